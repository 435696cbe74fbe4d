"""Responses: settle every admitted request, and store what clients can resume."""
