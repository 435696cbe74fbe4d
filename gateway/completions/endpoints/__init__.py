"""Routes of the generation API."""
