"""Monthly statements."""
