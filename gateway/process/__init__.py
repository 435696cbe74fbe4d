"""A gateway process: its services and applications, its HTTP server, and its shutdown."""
