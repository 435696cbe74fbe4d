"""The state of the service, for everybody: no credentials, no tenants, no numbers of requests."""
