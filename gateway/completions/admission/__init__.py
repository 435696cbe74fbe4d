"""Generation requests, from the HTTP body to the admitted request."""
