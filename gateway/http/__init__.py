"""What all routes share: middleware, authorization, bodies, errors and resources."""
