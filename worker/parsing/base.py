"""What the worker asks of parsers: each token goes in with exactly its text, and what it adds comes out.

All that a parser holds is a function of the tokens that it was fed, and of how the prompt ends: a new one
that is fed the tokens of an earlier attempt goes on like that attempt's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from contract.messages import CallPiece, Parsing
from contract.outcomes import FinishReason


class Parsed(NamedTuple):
    """What a token adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    is_reasoning: bool = False
    """Whether the token belongs to the reasoning, as its marks do."""


class Parser(Protocol):
    """Reads one answer apart."""

    def feed(self, token_id: int, text: str) -> Parsed:
        """Take in the next token. `text` is what it completes, often one word, sometimes nothing."""

    def finish(self, reason: FinishReason) -> Parsed:
        """Return what was held back, once the answer has ended; nothing is fed after that.

        Arguments that `max_tokens` has cut off stay cut off.
        """


MakeParser = Callable[[], Parser]


class Parsers(Protocol):
    """The parsers of one model."""

    def prepare(self, parsing: Parsing, opening: Sequence[int]) -> MakeParser | None:
        """Return what makes a parser for each answer of a job; None if there is nothing to look for.

        Args:
            parsing: What is looked for.
            opening: The last tokens of the prompt, which begin the answer.

        Raises:
            InvalidRequestError: The parsers do not take the tools.
        """


class NoParsers:
    """Of a model whose answers are told as they are."""

    def prepare(self, parsing: Parsing, opening: Sequence[int]) -> MakeParser | None:
        """Look for nothing."""
        del parsing, opening
        return None


NO_PARSERS = NoParsers()
