"""Compiling a grammar and walking some steps through it, as the engine will."""

import random
import time
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from contract.grammar import MAX_GRAMMAR_CHARACTERS, PARSER_LIMITS
from gateway.structure.errors import RefusedError

LIMITS: Final = LLParserLimits(**PARSER_LIMITS)

_MAX_REASON_CHARACTERS = 300
_REGEX_ERROR = "error: "
_MAX_STEPS = 96
_WALK_SECONDS = 0.15
"""Processor time after which walking ends."""
_MAX_STEP_SECONDS = 0.02
_NOTABLE_STEP_SECONDS = 0.002
_MAX_GROWTH = 4
"""A walk passes unless its second half took so many times as long as its first: some never stop growing."""


def probe(
    grammar: str, tokenizer: LLTokenizer, *, most_compile_seconds: float, walks: bool = True
) -> None:
    """Compile a grammar and, with `walks`, try it out. Raise RefusedError if it is wrong or too complex.

    Times are processor time, so that a busy machine refuses nothing.
    """
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise RefusedError(f"the grammar must have <= {MAX_GRAMMAR_CHARACTERS} characters")
    start = time.process_time()
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise RefusedError(_reason(matcher.get_error()))
    if time.process_time() - start > most_compile_seconds:
        raise RefusedError("too complex: it takes too long to compile")
    if walks:
        _walk(matcher, random.Random(_MAX_STEPS), tokenizer)  # noqa: S311 - no secret


def _walk(matcher: LLMatcher, choice: random.Random, tokenizer: LLTokenizer) -> None:
    steps: list[float] = []
    while len(steps) < _MAX_STEPS and sum(steps) < _WALK_SECONDS:
        began = time.process_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise RefusedError(_why_it_stopped(matcher, is_first=not steps))
        if matcher.is_stopped():
            return
        matcher.consume_token(_picked(mask, choice, tokenizer))
        steps.append(time.process_time() - began)
        if steps[-1] > _MAX_STEP_SECONDS:
            raise RefusedError("too complex: a step takes too long")
    half = len(steps) // 2
    later = sum(steps[half:])
    if later > max(_NOTABLE_STEP_SECONDS * half, _MAX_GROWTH * sum(steps[:half])):
        raise RefusedError("too complex: steps take longer and longer")


def _why_it_stopped(matcher: LLMatcher, *, is_first: bool) -> str:
    reason = _reason(matcher.get_error())
    if is_first and reason.startswith("NoExtension"):
        return "it matches no text"
    return f"too complex: {reason}"


def _picked(mask: int, choice: random.Random, tokenizer: LLTokenizer) -> int:
    """Return an allowed token: the first one from a random place on, and the end only if it must be."""
    going_on = mask
    for token in tokenizer.eos_tokens:
        going_on &= ~(1 << token)
    mask = going_on or mask
    rotated = mask >> (place := choice.randrange(tokenizer.vocab_size))
    if rotated:
        return place + (rotated & -rotated).bit_length() - 1
    return (mask & -mask).bit_length() - 1


def _reason(error: str) -> str:
    """Return what matters of llguidance's message: its first line, or the one about a regular expression."""
    lines = error.split("\n")
    detail = next((line for line in lines if line.startswith(_REGEX_ERROR)), None)
    if detail is not None:
        return f"invalid regular expression: {detail.removeprefix(_REGEX_ERROR)}"
    return lines[0].strip()[:_MAX_REASON_CHARACTERS]
