"""Chat templates of models: compiled as transformers compiles them, and rendered within bounds."""
