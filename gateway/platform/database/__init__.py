"""SQL: engine, tables and migrations.

Stores and queries contain no policy.
"""
