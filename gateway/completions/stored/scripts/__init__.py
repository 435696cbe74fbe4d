"""Lua scripts of stored responses, one file for each state transition, as in `contract.scripts`.

The two keys of a response share the hash tag `{r:REQUEST}`. Only its owner may write a response. A
takeover begins a new term; later writes with the term of an earlier owner are rejected.
"""
