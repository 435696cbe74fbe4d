"""Grammar limits on size and cost, which gateways validate with and engines run with."""

from typing import Final, TypedDict


class ParserLimits(TypedDict):
    """Arguments of `llguidance.LLParserLimits`."""

    max_items_in_row: int
    """Earley items after one byte. An ambiguous grammar exceeds it before its steps take 20 ms."""
    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_lexer_states: int
    """States of the lexer, one to two kB each, that one text may create."""
    max_grammar_size: int
    """Symbols of the compiled grammar."""
    precompute_large_lexemes: bool
    verbose_errors: bool


PARSER_LIMITS: Final[ParserLimits] = {
    "max_items_in_row": 500,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}

MAX_GRAMMAR_CHARACTERS: Final = 512 * 1024
"""Most characters of the Lark text, which is part of the job."""
