"""The worker: claims jobs of one model, continues them in batches, and sends the text to the gateways."""
