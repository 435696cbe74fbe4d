"""Sluice's own parsers: equal to vLLM's of the same names, but linear in the response's length."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass

from tokenizers import Tokenizer

from contract.messages import Parsing
from contract.outcomes import FinishReason
from worker.parsing.base import MakeParser, Parsed
from worker.parsing.hermes import HermesCalls


@dataclass(eq=False, slots=True)
class ReasoningMarks:
    """Separates reasoning from content at two single-token marks, as DeepSeek-R1 writes it.

    It returns what vLLM's parser `deepseek_r1` returns for one token at a time. The opening mark
    may be missing, also in the prompt.
    """

    _start_id: int
    _end_id: int
    opening: InitVar[Sequence[int]]
    is_open: bool = True
    """Whether the next token belongs to the reasoning."""

    def __post_init__(self, opening: Sequence[int]) -> None:
        for each in opening:
            if each in (self._start_id, self._end_id):
                self.is_open = each == self._start_id

    def feed(self, token_id: int, text: str) -> str:
        """Return the text of the next token of the reasoning; marks have none."""
        if token_id == self._end_id:
            self.is_open = False
            return ""
        return "" if token_id == self._start_id else text


THINKING = frozenset({"deepseek_r1"})
"""vLLM's names of the parser for reasoning between two marks."""

THINKING_START = "<think>"
THINKING_END = "</think>"

_NOTHING = Parsed()


@dataclass(eq=False, slots=True)
class OwnParser:
    """Parses reasoning, then calls; the rest is content."""

    _thinking: ReasoningMarks | None
    _calls: HermesCalls | None

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
            thinking = None if marks is None else ReasoningMarks(*marks, opening)
            calls = HermesCalls(parsing.text_tools) if finds_calls else None
            return OwnParser(thinking, calls)

        return make
