"""What can be requested: models, adapters, aliases, and their prices."""
