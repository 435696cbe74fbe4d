"""Pages for customers, on their port."""
