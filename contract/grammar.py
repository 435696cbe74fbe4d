"""Grammars: their limits, and the formats of calls, which gateways and engines agree on."""

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

HERMES_PARSERS: Final = frozenset({"hermes", "qwen3_json"})
"""vLLM's names of the parser for Hermes calls."""

ENFORCED_PARSERS: Final = HERMES_PARSERS | {
    *("qwen3_coder", "qwen3_xml", "llama3_json", "llama4_json"),
    *("mistral", "deepseek_v3", "deepseek_v31"),
}
"""vLLM's names of the parsers whose calls a grammar of the gateway can enforce."""

MAX_GRAMMAR_CHARACTERS: Final = 512 * 1024
"""Most characters of the Lark text, which is part of the job."""
