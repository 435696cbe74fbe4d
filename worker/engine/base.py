"""The engine interface of the worker.

An engine handles sequences only: token ids in, token ids out, one `EngineStep` for each step of its
batch. The worker handles text, stop strings, choices and jobs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

import msgspec

from contract.adapters import ModuleShapes
from contract.messages import (
    ChatFormat,
    ContextExcess,
    Exactness,
    Feature,
    Pooling,
    PoolingSupport,
)
from contract.sampling import SamplingSpec
from worker.parsing.base import Parsers

_MOST_SHOWN: Final = 80
"""Maximum characters of a value in an error."""
TokenScores = list[tuple[int, float]]
"""Log-probabilities at one position by token id: the actual token first, then the most likely."""


class EngineDeadError(Exception):
    """The engine and all its sequences are lost, and it cannot be restarted in this process."""


class InvalidRequestError(Exception):
    """The engine rejects a request and starts nothing of it. The message is fit for a client.

    Args:
        message: What is invalid.
        param: The invalid parameter, if known.
        excess: Token counts if a prompt with images exceeds the context window.
    """

    def __init__(
        self, message: str, *, param: str | None = None, excess: ContextExcess | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.excess = excess


def nothing_allowed(spec: SamplingSpec) -> InvalidRequestError:
    """Return the error of a request that forbids every token at its start."""
    bans = spec.bans
    given = ", ".join(f"'{name}' {_cut(json.dumps(value))}" for name, value in bans.items())
    names = " and ".join(f"'{name}'" for name in bans)
    return InvalidRequestError(
        f"{names} must allow at least one token to begin with. Given: {given}.",
        param=next(iter(bans), None),
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


class AdapterRejectedError(Exception):
    """The engine cannot load an adapter; nothing has changed."""


class EngineAdapter(NamedTuple):
    """An adapter that is loaded into an engine, or about to be."""

    number: int
    """From 1; never the same for two loads of one engine."""
    digest: str
    folder: str
    """Folder with its files, which the engine may read again while the adapter is loaded."""


class AdapterLimits(NamedTuple):
    """Which adapters an engine can load."""

    slots: int
    """Maximum number of adapters that sequences of one step use."""
    loaded: int
    """Maximum number of adapters that are loaded, at least `slots`."""
    max_rank: int
    modules: ModuleShapes
    """The modules of the base model that adapters may change."""


class SequenceEnd(StrEnum):
    """Why an engine ended a sequence."""

    STOP = "stop"  # The last token is the end-of-text token or a stop token.
    REPETITION = "repetition"  # The job's repetition detection matched.
    LENGTH = "length"  # max_tokens, or the context window, was reached.
    ABORTED = "aborted"  # The engine is stopping; another worker can resume the sequence.
    ERROR = "error"  # The engine gave up on this sequence.
    STUCK = "stuck"  # The request forbids every next token. The caller must abort the sequence.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to sample."""

    id: str
    """Unique during the lifetime of an engine."""
    prompt_token_ids: list[int]
    max_tokens: int
    """Maximum completion tokens, including `output_token_ids`, of which there must be fewer."""
    sampling: SamplingSpec
    seed: int
    """The sequence's own seed, in 0 to 2^63 - 1."""
    cache_salt: str
    logprobs: int | None = None
    """Number of most likely alternatives to score for each completion token; None scores
    nothing."""
    prompt_logprobs: int | None = None
    """Number of most likely alternatives to score for each prompt token; None scores nothing."""
    grammar: str = ""
    """Grammar of the text, in llguidance's Lark syntax; empty if unconstrained."""
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens that an earlier attempt produced. They count as output everywhere, but are not
    returned
    again."""
    images: list[bytes] = field(default_factory=list)
    """Image files, in the order of the image tokens in the prompt."""
    image_params: list[str] = field(default_factory=list)
    """The name of each image in error messages."""
    may_shorten: bool = True
    """Whether to lower max_tokens if images leave less room, instead of rejecting the request."""
    reads_prefix_cache: bool = True
    is_preemptible: bool = False
    """Whether sequences of other jobs go first."""
    tenant: str = ""
    weight: float = 1.0
    """How many times as much of the engine the tenant gets as one of weight 1."""
    adapter: EngineAdapter | None = None
    """None runs the base model. All sequences of one job have the same adapter."""
    pooling: Pooling | None = None
    """Set for an input of a pooling model, for which the fields about completions are unused."""
    audio: bytes = b""
    """What a model of speech transcribes, see `GenerationJob.audio`."""
    second_text: int | None = None
    """Token at which the second text of a pair begins; None for a single text."""


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """The output of one step for one sequence. A struct, because one is created for every token."""

    sequence_id: str
    token_ids: list[int]
    end: SequenceEnd | None = None
    stop_token_id: int | None = None
    """The token that ended the sequence; None for the end-of-text token. If a model has several
    end-of-text tokens, the others are reported here, too."""
    logprobs: list[TokenScores] | None = None
    prompt_logprobs: list[TokenScores] | None = None
    """One entry for each prompt token except the first."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; reported once, with the first output token."""
    prompt_tokens: int | None = None
    """Prompt tokens as the engine counts them, including images; reported once, with the first
    output
    token. Tokens of `output_token_ids` are not included."""
    prompt_ranks: list[int] | None = None
    """With `prompt_logprobs`: the rank of each of these tokens among all tokens, from 1."""
    pooled: bytes = b""
    """The result for an input of a pooling model, see `Delta.pooled`."""


class EngineStats(NamedTuple):
    """The load of an engine after a step."""

    running: int
    waiting: int
    kv_usage: float
    """Fraction of the KV cache in use, 0 to 1."""


class EngineStep(NamedTuple):
    """The output of one engine step."""

    outputs: list[SequenceOutput]
    stats: EngineStats | None
    preemptions: int = 0
    """Sequences preempted for lack of memory since the last step that reported any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The limits and properties of a started engine."""

    name: str
    """Name and version, such as `vllm 0.32.0`."""
    context_window: int
    vocabulary_size: int
    max_sequences: int
    """Maximum number of sequences sampled in one step."""
    kv_cache_tokens: int
    tokenizer_json: bytes
    """The model's tokenizer in the format of the `tokenizers` library."""
    bos_token_id: int | None
    eos_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a text unless a request ignores them."""
    features: list[Feature] = field(default_factory=list)
    image_token: str = ""
    """Text of the token that represents an image in a prompt; empty if the model has no vision."""
    max_images: int = 0
    """Maximum number of images in one prompt."""
    image_tokens: int = 0
    """Maximum prompt tokens of one image; 0 if unknown."""
    chat: ChatFormat | None = None
    """None for a model without a chat template."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Jinja sources of the chat templates by name."""
    cache_block_tokens: int = 0
    """Tokens of a block of the prefix cache; 0 if the engine does not report what is in it."""
    adapters: AdapterLimits | None = None
    """None if the engine runs the base model only."""
    can_sleep: bool = False
    """Whether the engine can free the memory of its device and keep its process."""
    pooling: PoolingSupport | None = None
    """Set for a model that generates no text."""
    clip_seconds: int = 0
    """Most seconds of audio in a request to a model of speech; 0 for any other model."""
    exactness: Exactness = field(default_factory=lambda: Exactness("", {}))
    """What its results depend on; the default while it starts."""


class Held(Protocol):
    """Where an engine adds and removes digests of `contract.affinity`."""

    def add(self, digest: bytes) -> None:
        """Hold a digest."""

    def remove(self, digest: bytes) -> None:
        """Hold a digest no longer."""


class Engine(Protocol):
    """An engine with continuous batching. Its methods are called from one event loop."""

    @property
    def info(self) -> EngineInfo:
        """Limits and properties of the engine; available once it has started."""

    @property
    def parsers(self) -> Parsers:
        """Parsers of the model's chat responses; available once the engine has started."""

    async def start(self) -> None:
        """Load the model without blocking the event loop."""

    async def aclose(self) -> None:
        """Stop the engine and all of its processes, even during startup."""

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Add the sequences of one job.

        They differ in id, seed, `output_token_ids` and `prompt_logprobs` only; inputs of a pooling
        model differ in `prompt_token_ids` and `second_text`.

        Slow if the prompt has images or the job has a grammar. Raises EngineDeadError, or
        InvalidRequestError, after which the caller must abort the sequences.
        """

    async def abort(self, sequence_ids: Sequence[str]) -> None:
        """End sequences immediately, without further output. Unknown ids are ignored."""

    async def load_adapter(self, adapter: EngineAdapter) -> None:
        """Load an adapter before requests use it.

        The caller loads no more than `AdapterLimits.loaded`. Raises AdapterRejectedError or
        EngineDeadError.
        """

    async def unload_adapter(self, adapter: EngineAdapter) -> None:
        """Unload an adapter that no sequence uses any more. Raises EngineDeadError."""

    async def step(self) -> EngineStep:
        """Wait for the outputs of the next step. Raises EngineDeadError."""

    async def read_cache(self, held: Held, /) -> None:
        """Note the prefixes that the cache has gained and lost since the last call."""

    async def sleep(self) -> None:
        """Move the weights to the machine's memory, and free the KV cache with all that it holds.

        The engine must have no sequences and no adapters. Raises EngineDeadError.
        """

    async def wake(self) -> None:
        """Take the memory of the device again, after `sleep`. Raises EngineDeadError."""
