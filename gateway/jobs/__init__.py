"""Background jobs: usage to the ledger, rollups, abandoned reservations, expiries and alerts.

Services do the work; Celery only schedules them. Each may run twice at once and may be killed at
any moment. If Redis or the database is unavailable, it ends quietly; the next run does the rest.
"""
