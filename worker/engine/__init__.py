"""Engines that run the model: a Protocol, vLLM, and a scripted engine for tests."""
