"""Size limits of a structure before compilation; `contract.grammar` has the limits of a grammar."""

from typing import Final

MAX_SOURCE_BYTES: Final = 1024 * 1024
"""Maximum bytes of a structure or a list of tools as sent to the sandbox."""
MAX_NESTING: Final = 64
"""Maximum nesting of groups in a grammar, and of objects and arrays in a schema."""

MAX_PATH_CHARACTERS: Final = 96
"""Maximum characters of a path in a schema before the name that exceeds them."""

MAX_CHOICES: Final = 1024
MAX_CHOICE_CHARACTERS: Final = 4096
MAX_REPETITIONS: Final = 2000
"""Maximum count in `{m,n}` of a GBNF grammar, as in llama.cpp."""

MAX_ITEMS: Final = 10_000
"""Maximum `minItems` or `maxItems`: each item uses memory when the grammar is compiled."""
MAX_PROPERTIES: Final = 10_000
MAX_LENGTH: Final = 2**31 - 1
"""Maximum `minLength` or `maxLength` that the compiler can read."""
MAX_CLOSING_STEPS: Final = 500_000
"""Maximum names and schemas that closing a schema may copy: compositions can multiply them."""
