"""Answers: settle every admitted request, and store responses that clients can resume."""
