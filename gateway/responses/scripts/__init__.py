"""Lua scripts of answers, one file for each state transition, as in `contract.scripts`.

The two keys of an answer share the hash tag `{r:REQUEST}`. Only its owner may write an answer. A
takeover begins a new term; later writes with the term of an earlier owner are rejected.
"""
