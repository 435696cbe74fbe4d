"""The ledger: one row for each request that has ended, sums of them, and what limits need to know of them.

Rows are only ever added, and the first one of a request counts. Sums are made from rows and never corrected.
"""
