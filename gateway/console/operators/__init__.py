"""Pages for operators, on their port."""
