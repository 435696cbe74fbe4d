"""What was used and what it costs."""
