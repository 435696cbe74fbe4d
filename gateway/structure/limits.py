"""How large a structure may be before it is a grammar; what a grammar may be is in `contract.grammar`."""

from typing import Final

MAX_SOURCE_BYTES: Final = 128 * 1024
"""Bytes of a structure or a list of tools as it is sent to the sandbox."""
MAX_NESTING: Final = 64
"""Levels of groups in a grammar and of objects and arrays in a schema."""

MAX_CHOICES: Final = 1024
MAX_CHOICE_CHARACTERS: Final = 4096
MAX_REPETITIONS: Final = 2000
"""The largest count in a GBNF grammar's `{m,n}`, as in llama.cpp."""

MAX_ITEMS: Final = 10_000
"""The largest `minItems` or `maxItems`: each item costs memory when the grammar is compiled."""
MAX_PROPERTIES: Final = 10_000
MAX_LENGTH: Final = 2**31 - 1
"""The largest `minLength` or `maxLength` that the compiler can read."""
