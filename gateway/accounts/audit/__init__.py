"""The audit log: a chain of signed entries."""
