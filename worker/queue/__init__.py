"""The worker's side of Redis: leases, heartbeats of gateways, reply streams."""
