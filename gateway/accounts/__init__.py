"""The management API: a module, or a package of several, for each resource.

A resource has a service (policy and queries), bodies, routes and a command. Its service is a module
of its own if programs without an HTTP server use it.
"""
