"""The management API: one package for each resource.

A resource has a service (policy), a store (queries), schemas (bodies), routes and a command.
`routers` includes the routes for tenants and operators.
"""
