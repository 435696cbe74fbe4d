"""API dialects: convert vendor fields into one `GenerationRequest`."""
