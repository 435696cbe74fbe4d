"""Tenants and their API keys in SQL: tables, stores, migrations, and the rules of a tenant's life.

The only room that knows SQLAlchemy's tables. Stores hold queries and no policy.
"""
