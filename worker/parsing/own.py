"""Sluice's own parsers: equal to vLLM's of the same names, but linear in the response's length."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from contract.messages import Parsing
from contract.outcomes import FinishReason
from worker.parsing.base import MakeParser, Parsed
from worker.parsing.hermes import HermesCalls
from worker.parsing.thinking import Thinking

HERMES = frozenset({"hermes", "qwen3_json"})
"""vLLM's names of the parser for Hermes calls."""

THINKING = frozenset({"deepseek_r1"})
"""vLLM's names of the parser for reasoning between two marks."""

THINKING_START = "<think>"
THINKING_END = "</think>"

_NOTHING = Parsed()


class OwnParser:
    """Parses reasoning, then calls; the rest is content."""

    __slots__ = ("_calls", "_thinking")

    def __init__(self, thinking: Thinking | None, calls: HermesCalls | None) -> None:
        self._thinking = thinking
        self._calls = calls

    def feed(self, token_id: int, text: str) -> Parsed:
        """Parse the next token and the text that it completes."""
        if self._thinking is not None and self._thinking.is_open:
            return Parsed(reasoning=self._thinking.feed(token_id, text), is_reasoning=True)
        if not text:
            return _NOTHING
        if self._calls is None:
            return Parsed(text)
        content, pieces = self._calls.feed(text)
        return Parsed(content, calls=pieces)

    def finish(self, reason: FinishReason) -> Parsed:
        """Return content that was held back because it could have begun a call."""
        del reason
        return _NOTHING if self._calls is None else Parsed(self._calls.flush())


class OwnParsers:
    """The parsers of a model that writes Hermes calls, or reasoning between marks, or both."""

    def __init__(
        self, tokenizer: Tokenizer, *, finds_calls: bool = True, finds_reasoning: bool = True
    ) -> None:
        self._finds_calls = finds_calls
        self._marks = None
        if finds_reasoning:
            start, end = map(tokenizer.token_to_id, (THINKING_START, THINKING_END))
            if start is None or end is None:
                raise ValueError(
                    f"{THINKING_START} and {THINKING_END} must be tokens of the model."
                )
            self._marks = start, end

    def prepare(self, parsing: Parsing, opening: Sequence[int]) -> MakeParser | None:
        """Return a factory of parsers for a job's responses; None if there is nothing to parse."""
        finds_calls = self._finds_calls and bool(parsing.tools)
        marks = self._marks if parsing.finds_reasoning else None
        if not finds_calls and marks is None:
            return None

        def make() -> OwnParser:
            thinking = None if marks is None else Thinking(*marks, opening)
            return OwnParser(thinking, HermesCalls() if finds_calls else None)

        return make
