"""The path of a request: its packages are its stages, in order."""
