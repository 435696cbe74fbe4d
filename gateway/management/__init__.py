"""The management API: one package for each resource.

A resource has a service (policy), a store (queries), schemas (bodies), routes for tenants, routes
for operators and a command.
"""
