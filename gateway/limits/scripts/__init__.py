"""Lua scripts for limits and money: one file for each transition, as in `contract.scripts`.

All keys of a tenant's bucket share the hash tag `{b:NN}`. Amounts are written with `%d`: Lua
numbers are doubles, which are exact up to 2**53, but the default format has fourteen digits.
"""
