"""llama.cpp's sampler chain for vLLM: its mathematics, and what joins it to vLLM's model runners."""
