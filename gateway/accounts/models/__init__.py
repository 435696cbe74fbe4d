"""Models that workers have announced."""
