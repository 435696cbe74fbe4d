"""Usage reports and exports."""
