"""Projects, parts of a tenant."""
