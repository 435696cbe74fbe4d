"""Records of tenants, projects, members, keys and plans, their limits and rights."""
