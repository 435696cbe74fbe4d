"""How large a structure may be, and what it may cost."""

from typing import Final

MAX_SOURCE_BYTES: Final = 128 * 1024
"""Bytes of a structure or a list of tools as it is sent to the sandbox."""
MAX_NESTING: Final = 64
"""Levels of groups in a grammar and of objects and arrays in a schema."""
MAX_GRAMMAR_CHARACTERS: Final = 512 * 1024
"""Characters of the Lark text, which travels with every job."""

MAX_CHOICES: Final = 1024
MAX_CHOICE_CHARACTERS: Final = 4096
MAX_REPETITIONS: Final = 2000
"""The largest count in a GBNF grammar's `{m,n}`, as in llama.cpp."""

MAX_ITEMS: Final = 10_000
"""The largest `minItems` or `maxItems`: each item costs memory when the grammar is compiled."""
MAX_PROPERTIES: Final = 10_000
MAX_LENGTH: Final = 2**31 - 1
"""The largest `minLength` or `maxLength` that the compiler can read."""

MAX_ITEMS_IN_ROW: Final = 500
"""Earley items after one byte. An ambiguous grammar exceeds it before its steps take 20 ms."""
STEP_MAX_ITEMS: Final = 10_000
STEP_LEXER_FUEL: Final = 100_000
INITIAL_LEXER_FUEL: Final = 500_000
MAX_LEXER_STATES: Final = 30_000
"""States of the lexer, one to two kB each, that a text may lead through."""
MAX_GRAMMAR_SYMBOLS: Final = 200_000
