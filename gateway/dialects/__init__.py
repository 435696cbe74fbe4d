"""Room 3: vendor fields become one `GenerationRequest`."""
