"""What continues prompts: a Protocol, vLLM behind it, and a scripted engine for tests."""
