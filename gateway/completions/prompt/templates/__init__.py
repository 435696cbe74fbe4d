"""Chat templates of models: compiled as in transformers and rendered within limits."""
