"""Support for tests: real servers as child processes, and clients for them."""
