"""Plans: default limits of tenants."""
