"""The server process: applications, HTTP protocol limits, graceful shutdown."""
