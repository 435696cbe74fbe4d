"""What every dialect is turned into before anything is looked up."""

from dataclasses import dataclass
from enum import StrEnum

from contract.sampling import SamplingSpec

Prompt = str | list[str | int]
"""One prompt: text, or a list of token ids in which text pieces may stand."""


class ContextLengthBehavior(StrEnum):
    """What happens when prompt and max_tokens together exceed the context window."""

    TRUNCATE = "truncate"  # max_tokens is lowered to what fits.
    ERROR = "error"  # The request is refused.


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A completion request with every default filled in."""

    model: str
    prompts: list[Prompt]
    max_tokens: int
    """Completion tokens for each choice; -1 asks for all that fit."""
    context_length_behavior: ContextLengthBehavior
    n: int
    best_of: int
    stop: list[str]
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    """Whether a stream ends with OpenAI's extra chunk that carries only usage."""
    sampling: SamplingSpec
    ignored_parameters: tuple[str, ...]
    """Parameters of the body that have no effect here, to be named in the answer."""
