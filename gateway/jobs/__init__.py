"""What happens in the background: usage into the ledger, sums, abandoned reservations, expiries, alerts.

Services do the work; Celery only tells them when. Each of them may run twice at once, may be killed at any
moment, and ends quietly while Redis or the database is away: what is left is done next time.
"""
