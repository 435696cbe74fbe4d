"""Structured output: compile what a client's text must match into one bounded grammar.

Every input language is translated to Lark for llguidance. Client grammars are translated and
compiled in child processes with memory and time limits, so that a bad grammar harms no other
request. A grammar that passes there is cheap in the engine too.
"""
