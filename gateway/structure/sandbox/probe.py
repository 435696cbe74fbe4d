"""Compile a grammar and walk a few steps through it, as the engine does."""

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
"""CPU time after which a walk ends."""
_MAX_STEP_SECONDS = 0.02
_NOTABLE_STEP_SECONDS = 0.002
_MAX_GROWTH = 4
"""Maximum ratio of the second half's time to the first half's: some grammars never stop growing."""


def probe(
    grammar: str, tokenizer: LLTokenizer, *, most_compile_seconds: float, walks: bool = True
) -> None:
    """Compile a grammar and, with `walks`, try it out.

    Raises RefusedError if the grammar is invalid or too complex. Limits are in CPU time, so that a
    busy machine causes no rejections.
    """
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise RefusedError(f"the grammar must have at most {MAX_GRAMMAR_CHARACTERS} characters")
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
        raise RefusedError("too complex: the time per step keeps growing")


def _why_it_stopped(matcher: LLMatcher, *, is_first: bool) -> str:
    reason = _reason(matcher.get_error())
    if is_first and reason.startswith("NoExtension"):
        return "it matches no text"
    return f"too complex: {reason}"


def _picked(mask: int, choice: random.Random, tokenizer: LLTokenizer) -> int:
    """Return the first allowed token from a random position; the end token only if forced."""
    unfinished = mask
    for token in tokenizer.eos_tokens:
        unfinished &= ~(1 << token)
    mask = unfinished or mask
    rotated = mask >> (place := choice.randrange(tokenizer.vocab_size))
    if rotated:
        return place + (rotated & -rotated).bit_length() - 1
    return (mask & -mask).bit_length() - 1


def _reason(error: str) -> str:
    """Return the useful part of llguidance's message: its first line, or the one about a regex."""
    lines = error.split("\n")
    detail = next((line for line in lines if line.startswith(_REGEX_ERROR)), None)
    if detail is not None:
        return f"invalid regular expression: {detail.removeprefix(_REGEX_ERROR)}"
    return lines[0].strip()[:_MAX_REASON_CHARACTERS]
