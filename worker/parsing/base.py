"""The parser interface of the worker: each token is fed with its exact text.

A parser's state is a function of the tokens fed and of the prompt's end. After a resumption, a new
parser that is fed the tokens of the earlier attempt is in the same state.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from contract.messages import CallPiece, Parsing
from contract.outcomes import FinishReason


class Parsed(NamedTuple):
    """What a token adds to a response."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    is_reasoning: bool = False
    """Whether the token, which may be a mark, belongs to the reasoning."""


class Parser(Protocol):
    """Parses one response."""

    def feed(self, token_id: int, text: str) -> Parsed:
        """Parse the next token. `text` is what it completes, often one word, sometimes nothing."""

    def finish(self, reason: FinishReason) -> Parsed:
        """Return held-back output after the end of the response; nothing may be fed afterwards.

        Arguments that `max_tokens` cut off stay incomplete.
        """


MakeParser = Callable[[], Parser]


class Parsers(Protocol):
    """The parsers of one model."""

    def prepare(self, parsing: Parsing, opening: Sequence[int]) -> MakeParser | None:
        """Return a factory of parsers for a job's responses; None if there is nothing to parse.

        Args:
            parsing: What to parse.
            opening: The last tokens of the prompt, which begin the response.

        Raises:
            InvalidRequestError: The parsers do not accept the tools.
        """


class NoParsers:
    """The parsers of a model whose responses are not parsed."""

    def prepare(self, parsing: Parsing, opening: Sequence[int]) -> MakeParser | None:
        """Return None: there is nothing to parse."""
        del parsing, opening
        return None


NO_PARSERS = NoParsers()
