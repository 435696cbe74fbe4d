"""Adapters: registration, checks and copies of LoRA adapters, and their management API."""
