"""What the worker asks of an engine.

An engine knows sequences only: token ids in, token ids out, one `EngineStep` for each step of its batch.
Text, stop strings, choices and jobs are the worker's affair.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from contract.messages import ChatFormat, Feature
from contract.sampling import SamplingSpec
from worker.parsing.base import Parsers

TokenScores = list[tuple[int, float]]
"""Log-probabilities at one position by token id: the token that stands there first, then the likeliest."""


class EngineDeadError(Exception):
    """The engine is gone with all its sequences and cannot be revived in this process."""


class InvalidRequestError(Exception):
    """The engine refuses a request; nothing of it was started. The message is fit for a client.

    Args:
        message: what is wrong.
        param: the parameter that is, if it is known.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SequenceEnd(StrEnum):
    """Why an engine ended a sequence."""

    STOP = "stop"  # The last token is the end-of-text token or a stop token.
    REPETITION = "repetition"  # It repeats itself, in the sense of the job's repetition detection.
    LENGTH = "length"  # max_tokens, or the context window, was reached.
    ABORTED = "aborted"  # The engine is being stopped; the sequence could go on elsewhere.
    ERROR = "error"  # The engine gave up on this sequence.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to be sampled."""

    id: str
    """Never used twice in the life of an engine."""
    prompt_token_ids: list[int]
    max_tokens: int
    """Completion tokens at most, `output_token_ids` included; more than those."""
    sampling: SamplingSpec
    seed: int
    """The sequence's own seed, in 0 to 2^63 - 1."""
    cache_salt: str
    logprobs: int | None = None
    """Most likely alternatives to score for each completion token; None scores nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""
    grammar: str = ""
    """What the text must match, in llguidance's Lark syntax; empty matches all."""
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens that an earlier attempt has put out. They count as output in everything, and are not put out
    again."""
    images: list[bytes] = field(default_factory=list)
    """Image files, in the order of the image tokens in the prompt."""
    image_params: list[str] = field(default_factory=list)
    """What each of them is called in errors."""
    may_shorten: bool = True
    """Whether max_tokens is lowered where images leave less room, or the request refused."""
    reads_prefix_cache: bool = True


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step added to one sequence. A struct, because one is made for every token."""

    sequence_id: str
    token_ids: list[int]
    end: SequenceEnd | None = None
    stop_token_id: int | None = None
    """The token that ended the sequence; None for the end-of-text token. A model may have more ends of
    text than one, which come here, too."""
    logprobs: list[TokenScores] | None = None
    prompt_logprobs: list[TokenScores] | None = None
    """One entry for each prompt token but the first."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; reported once, with the first token put out."""
    prompt_tokens: int | None = None
    """Prompt tokens as the engine read them, images included; reported once, with the first token put
    out. Those of `output_token_ids` are not among them."""


class EngineStats(NamedTuple):
    """How full an engine is after a step."""

    running: int
    waiting: int
    kv_usage: float
    """Part of the KV cache in use, 0 to 1."""


class EngineStep(NamedTuple):
    """Everything one engine step produced."""

    outputs: list[SequenceOutput]
    stats: EngineStats | None
    preemptions: int = 0
    """Sequences that were put off for lack of room, since the last step that told of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a started engine can take."""

    name: str
    """Name and version, such as `vllm 0.32.0`."""
    context_window: int
    vocabulary_size: int
    max_sequences: int
    """Sequences that are sampled in one step, at most."""
    kv_cache_tokens: int
    tokenizer_json: bytes
    """The model's tokenizer in the format of the `tokenizers` library."""
    bos_token_id: int | None
    eos_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a text unless a request ignores them."""
    features: list[Feature] = field(default_factory=list)
    image_token: str = ""
    """Text of the token that stands for an image in a prompt; empty if the model sees none."""
    max_images: int = 0
    """Images of one prompt, at most."""
    image_tokens: int = 0
    """Prompt tokens that one image takes at most; 0 if that is not known."""
    chat: ChatFormat | None = None
    """None for a model without a chat template."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Their Jinja sources by name."""


class Engine(Protocol):
    """An engine that batches continuously. Its methods are called from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """What the engine can take; known once it has started."""

    @property
    def parsers(self) -> Parsers:
        """What reads the answers of its model's chats apart; known once it has started."""

    async def start(self) -> None:
        """Load the model. The event loop stays free meanwhile."""

    async def aclose(self) -> None:
        """Stop, also while starting. No process is left behind."""

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Add the sequences of one job.

        They differ in id, seed, `output_token_ids` and `prompt_logprobs` only.

        Takes a while where the prompt has images or the job a grammar. Raises EngineDeadError, or
        InvalidRequestError: what has been added by then is to be aborted.
        """

    async def abort(self, sequence_ids: Sequence[str]) -> None:
        """End sequences at once, without a further output. Unknown ids are ignored."""

    async def step(self) -> EngineStep:
        """Wait for the next step's outputs. Raises EngineDeadError."""
