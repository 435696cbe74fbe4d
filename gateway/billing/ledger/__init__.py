"""The usage ledger: one row per ended request, sums of the rows, and queries for limits.

Rows are only added, and the first row of a request counts. Sums are derived from rows and never
corrected.
"""
