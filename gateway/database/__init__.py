"""SQL: engine, tables, migrations, and the ledger of usage.

Stores and queries contain no policy.
"""
