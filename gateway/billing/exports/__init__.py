"""Exports: the ledger as events in billing systems."""
