"""Images that requests name by URL: fetched from hosts that the operator allows, within bounds."""
