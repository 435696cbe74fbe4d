"""HTTP API: handlers read a request, call the other packages and build the response."""
