"""The worker: claims jobs of one model, runs them in batches, and sends the output to gateways."""
