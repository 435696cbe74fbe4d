"""Stages of the sampler chain."""
