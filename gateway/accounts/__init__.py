"""Tenants and their API keys in SQL: tables, stores, migrations and services.

This package alone uses SQLAlchemy's tables. Stores contain queries and no policy.
"""
