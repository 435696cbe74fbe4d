"""Claimed jobs: checks, batches, sequences, text and logprobs."""
