"""Usage records from Redis into the SQL ledger: drain, sweep, reconcile."""
