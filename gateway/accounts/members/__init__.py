"""Members, the people of a tenant."""
