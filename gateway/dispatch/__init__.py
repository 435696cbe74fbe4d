"""Dispatch: enqueue jobs, follow their replies and cancel them."""
