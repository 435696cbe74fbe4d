"""Image URLs in requests: fetch images from hosts that the operator allows, within limits."""
