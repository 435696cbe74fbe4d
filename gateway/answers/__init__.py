"""Answers: the end of every admitted request, and what its client may come back for."""
