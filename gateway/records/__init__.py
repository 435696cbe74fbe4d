"""Records: tenants, keys, limits, rights, usage, and errors, without technology."""
