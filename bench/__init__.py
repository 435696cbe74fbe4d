"""Benchmarks of Sluice, side by side with vLLM's own API server: `python -m bench --help`."""
