"""llama.cpp's sampler chain for vLLM: the algorithms, and adapters to vLLM's model runners."""
