"""Outbound connections to customer-supplied URLs, only to checked addresses."""
