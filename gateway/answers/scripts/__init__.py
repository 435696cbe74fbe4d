"""Lua scripts of answers: one file for each transition, as in `contract.scripts`.

The two keys of an answer share the hash tag `{r:REQUEST}`. An answer is written by its owner only, which the
number of its term tells: who takes an answer over begins a new term, and what an earlier owner writes from
then on is refused.
"""
