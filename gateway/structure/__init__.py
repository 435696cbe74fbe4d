"""Structure: whatever a client says the text must match, made into one bounded grammar for the engine.

Everything becomes Lark text for llguidance, whichever language it came in. Clients' grammars are translated
and compiled in child processes with bounds on memory and time, so that a bad one hurts nobody; what passes
there is cheap in the engine, too.
"""
