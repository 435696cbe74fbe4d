"""The messages between gateway and worker, and how they are put into bytes.

A `GenerationJob` travels from gateway to worker inside the queue. A `Frame` travels back: all that one
engine step produced for one gateway, in one Redis stream entry. Frames are arrays on the wire
(`array_like`), because a delta is sent for every token; fields may only be appended, with defaults.
"""

from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from contract.outcomes import FailureCode, FinishReason
from contract.sampling import SamplingSpec
from contract.tier import ServiceTier


class Ranking(StrEnum):
    """How `best_of` compares sequences."""

    MEAN = "mean"  # By log-probability per token (OpenAI).
    SUM = "sum"  # By log-probability of the whole sequence, and always in that order (mistral.rs).


class SequenceProgress(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a job's gateway has received of one sequence."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """Set for a sequence that has ended, which no engine needs to go on with."""
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0
    """Of these tokens, where sequences are ranked."""


class Resumption(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a job goes on that an earlier attempt has begun.

    Tokens stand here exactly as they were received; an attempt continues behind them and tells none again.
    """

    sequences: list[SequenceProgress]
    """One for each sequence that is sampled: one if they would all be the same, else `best_of`."""
    prompt_tokens: int = 0
    """As the first attempt counted them, like `cached_tokens`; 0 if it did not tell."""
    cached_tokens: int = 0
    is_prompt_scored: bool = False
    """Whether the prompt's log-probabilities have been received."""
    generation_ms: float = 0.0
    """Time since the first token, of all earlier attempts."""


class Parsing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the text of a chat answer is read apart, by the parsers of the model's card."""

    tools: list[dict[str, Any]] = []
    """Functions that the answer may call, as the client described them; without any, no call is looked for."""
    has_hermes_calls: bool = False
    """Whether calls come as Hermes writes them, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, whatever
    the model's own form: `GenerationJob.grammar` sees to that."""
    finds_reasoning: bool = False
    opening_tokens: int = 0
    """Last tokens of the prompt that begin the answer: they tell whether it begins within its reasoning."""
    template_arguments: dict[str, Any] = {}
    """What the chat template was given beside the messages, which some parsers read."""


class GenerationJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt with everything a worker needs to continue it."""

    id: str
    handle: int
    """Number under which the owning gateway process knows the job; it comes back in every delta."""
    gateway: str
    tenant: str
    cache_salt: str
    """Separates prefix caches: jobs share cached prompt blocks only if this value is equal."""
    prompt_token_ids: Sequence[int]
    """Gateways keep an array: a fifth of the memory, which the garbage collector does not visit."""
    max_tokens: int
    """Completion tokens at most, exact: prompt + max_tokens fits the context window. 0 scores the prompt only."""
    sampling: SamplingSpec
    deadline_ms: int
    """Unix time in milliseconds after which nobody waits for the job."""
    n: int = 1
    best_of: int = 1
    """Sequences to sample; the best `n` are returned."""
    ranking: Ranking = Ranking.MEAN
    stop: list[str] = []
    includes_stop: bool = False
    """Whether the text of a choice ends with the stop string that ended it."""
    logprobs: int | None = None
    """Number of most likely alternatives to report for each token; None reports nothing."""
    score_prompt: bool = False
    """Whether the prompt's own tokens are reported with log-probabilities (echo with logprobs)."""
    stream: bool = False
    """Whether somebody reads along; if not, the worker gathers tokens into fewer deltas."""
    grammar: str = ""
    """What the text must match, in llguidance's Lark syntax, compiled once already; empty matches all."""
    reads_prefix_cache: bool = True
    shows_special_tokens: bool = False
    """Whether special tokens (end-of-text and stop tokens excepted) show in the text."""
    max_predict_ms: int = 0
    """Time after which generation ends once a line has ended (llama.cpp's `t_max_predict_ms`); 0: never."""
    images: list[bytes] = []
    """Image files, in the order of the image tokens in the prompt."""
    image_params: list[str] = []
    """Where each of them stands in the client's body, for errors; empty for `images[0]` and so on."""
    may_shorten: bool = True
    """Whether max_tokens is lowered if images make the prompt longer than fits, or the job refused."""
    service_tier: ServiceTier = ServiceTier.DEFAULT
    resumption: Resumption | None = None
    is_suspect: bool = False
    """Whether an engine died with it: until it gets a token, no other suspect runs beside it."""
    is_background: bool = False
    """Whether it is wanted even if its gateway is gone; another one will then take it over."""
    parsing: Parsing | None = None
    """How a chat answer is read apart; None tells the text as it is."""
    request_id: str = ""
    """The `x-request-id` of its HTTP request, for logs and traces; empty if it has none."""
    traceparent: str = ""
    """Its place in a trace (W3C Trace Context): the span of this attempt; empty if nobody traces it."""
    earlier_traceparent: str = ""
    """The span of the attempt before this one."""

    @property
    def is_replicated(self) -> bool:
        """Whether one sequence answers every choice, because all would come out the same."""
        return self.sampling.is_greedy or self.max_tokens == 0

    @property
    def is_ranked(self) -> bool:
        """Whether sequences are compared, so that choices are known only when all have ended."""
        is_compared = self.best_of > self.n or (self.ranking is Ranking.SUM and self.n > 1)
        return is_compared and not self.is_replicated

    @property
    def sequences(self) -> int:
        """Sequences that are sampled."""
        return 1 if self.is_replicated else self.best_of


LOGPROBS_AT_ONCE: Final = 512
"""Tokens of a prompt whose log-probabilities are decoded at once, in about a millisecond."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of its likeliest alternatives."""

    token: str
    logprob: float | None
    """None for the first token of a prompt, which nothing precedes."""
    offset: int
    """Where the token's text starts, in code points from the start of its text (prompt or completion)."""
    top: list[tuple[str, float]] | None = None
    """Alternatives, likeliest first; the token itself is among them. Several may have the same text."""


class CallPiece(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What is added to one call of a tool."""

    index: int
    """Which call of the choice, from 0."""
    name: str = ""
    """The function, in the first piece of a call and only there."""
    arguments: str = ""
    """The next part of the arguments, JSON as the model writes it."""


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New text of one choice."""

    handle: int
    attempt: int
    choice: int
    """Index within the job, 0 to n - 1; where sequences are ranked that of the sequence, 0 to best_of - 1."""
    start: int
    """Tokens of the choice that came before, those of earlier attempts included."""
    text: str
    """What the client reads; of an answer that is read apart (`GenerationJob.parsing`) its content only."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id of the stop token, that ended the choice; None for end-of-text."""
    logprobs: bytes = b""
    """A `TokenLogprob` for each token, as `encode_logprobs` returns them; empty if none were asked for."""
    cumulative_logprob: float = 0.0
    """Of the sequence so far, these tokens included, where sequences are ranked."""
    reasoning: str = ""
    calls: list[CallPiece] = []
    reasoning_tokens: int = 0
    """How many of the tokens belong to the reasoning, its marks included."""


class JobStarted(msgspec.Struct, frozen=True, array_like=True):
    """An engine has read the prompt. Not told of a job that ends in the same frame."""

    handle: int
    attempt: int
    prompt_tokens: int
    cached_tokens: int


class PromptScored(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a prompt, sent before the first delta of its job."""

    handle: int
    attempt: int
    logprobs: list[bytes]
    """Of LOGPROBS_AT_ONCE tokens each, as `encode_logprobs` returns them."""


class JobFinished(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A job came to its end; counts are the engine's own."""

    handle: int
    attempt: int
    prompt_tokens: int
    completion_tokens: int
    """Tokens of all sequences, those that `best_of` discarded included."""
    cached_tokens: int
    """Prompt tokens that the engine found in its prefix cache."""
    prefill_ms: float = 0.0
    """From the claim to the first token."""
    generation_ms: float = 0.0
    """From the first token to the end."""
    chosen: list[int] = []
    """The sequences that are returned, the best first, where sequences are ranked; else empty."""


class JobFailed(msgspec.Struct, frozen=True, array_like=True):
    """A job ended without a result."""

    handle: int
    attempt: int
    code: FailureCode
    message: str
    retry_after_seconds: float | None = None
    """When another try may find room, of a job that was shed; None if that is not known."""
    param: str | None = None
    """The parameter that an engine refused, if it is known."""


class ReturnReason(StrEnum):
    """Why a worker gives a job back that it could not finish."""

    DRAINING = "draining"  # It stops, and the time for that is over.
    ENGINE_DIED = "engine_died"  # Its engine died or hung with the job aboard.


class JobReturned(msgspec.Struct, frozen=True, array_like=True):
    """A worker gives a job back: everything it has put out was told, and another one can go on with it."""

    handle: int
    attempt: int
    reason: ReturnReason
    has_progressed: bool
    """Whether this attempt has put out a token."""


class JobLost(msgspec.Struct, frozen=True, array_like=True):
    """A lease ran out; sent by whichever gateway found it to the one that owns the job."""

    handle: int
    attempt: int
    model: str = ""
    """With the next two: where the job is, for an owner that follows it no more. Empty from older gateways."""
    job_id: str = ""
    tenant: str = ""


class Follow(msgspec.Struct, frozen=True, array_like=True):
    """Asks the gateway that owns an answer to tell another one, for some seconds, whenever it has grown."""

    request_id: str
    gateway: str
    """Who asks."""
    handle: int
    """Number that comes back in `AnswerGrown`."""
    is_over: bool = False
    """Whether it has been asked before and is of no interest any more."""


class AnswerGrown(msgspec.Struct, frozen=True, array_like=True):
    """An answer that is followed has more in its journal, or has ended."""

    handle: int


class CancelAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Asks the gateway that owns an answer to end it."""

    request_id: str


class Frame(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one worker has to tell one gateway after an engine step.

    `number` counts a worker's frames to this gateway from 1 without a gap, so that a lost frame is
    seen. Number 0 is out of the count: a notice from another gateway. The lists are to be applied in
    the order of the fields. The deltas of all choices that one step added to stand in one frame.
    """

    worker: str
    """Id of the sender."""
    number: int
    started: list[JobStarted] = []
    prompts: list[PromptScored] = []
    deltas: list[Delta] = []
    finished: list[JobFinished] = []
    failed: list[JobFailed] = []
    returned: list[JobReturned] = []
    lost: list[JobLost] = []
    follows: list[Follow] = []
    grown: list[AnswerGrown] = []
    cancels: list[CancelAnswer] = []


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    LOADING = "loading"  # The engine is starting; nothing is claimed yet.
    READY = "ready"  # Claims jobs.
    DRAINING = "draining"  # Finishes what it has and claims nothing more.
    RESTARTING = "restarting"  # Its engine died and is being started again.


class Feature(StrEnum):
    """What not every model or engine can do."""

    SAMPLER_CHAIN = "sampler_chain"  # `SamplingSpec.chain`
    STRUCTURE = "structure"  # `GenerationJob.grammar`
    IMAGES = "images"  # `GenerationJob.images`
    CHAT = "chat"  # The model has a chat template: `WorkerCard.chat`.
    TOOLS = "tools"  # `Parsing.tools`
    STRICT_TOOLS = "strict_tools"  # Calls in the form in which `GenerationJob.grammar` has them, also unforced.
    REASONING = "reasoning"  # `Parsing.finds_reasoning`
    THINKING_BUDGET = "thinking_budget"  # `SamplingSpec.thinking_budget`


class ContentFormat(StrEnum):
    """In which form a chat template takes the content of a message."""

    STRING = "string"
    PARTS = "parts"  # A list of objects with a `type`.


class ChatFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a model is talked with."""

    template_digest: str
    """SHA-256 of the chat template, under which the worker published it."""
    content_format: ContentFormat = ContentFormat.STRING
    special_tokens: dict[str, str] = {}
    """What templates know by name, such as `bos_token`."""
    tool_parser: str = ""
    """vLLM's name of it; empty if calls are not found in the text."""
    reasoning_parser: str = ""
    reasoning_start: str = ""
    """Text of the token that begins reasoning."""
    reasoning_end: str = ""
    shows_special_tokens: bool = False
    """Whether the parsers look for special tokens, which are shown to them only."""


class WorkerCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker announces about itself and the model it serves."""

    id: str
    model: str
    state: WorkerState
    engine: str
    """Name and version of the engine, such as `vllm 0.32.0`."""
    created: int
    """Unix time in seconds at which the worker started."""
    context_window: int = 0
    """Prompt and completion tokens together, at most."""
    vocabulary_size: int = 0
    bos_token_id: int | None = None
    tokenizer_digest: str = ""
    """SHA-256 of the model's tokenizer.json, under which the worker published it."""
    max_sequences: int = 0
    kv_cache_tokens: int = 0
    features: list[Feature] = []
    aliases: list[str] = []
    """Other names under which clients may ask for the model."""
    dialect: str = ""
    """The dialect in which the model is asked unless a request says otherwise; empty: the gateway's default."""
    eos_token_ids: list[int] = []
    image_token: str = ""
    """Text of the token that stands for an image in a prompt; empty if the model sees none."""
    max_images: int = 0
    engine_restarts: int = 0
    """How often its engine died and was started again."""
    last_failure: str = ""
    """Why its engine died or could not be started, the last time; empty if that never happened."""
    chat: ChatFormat | None = None
    """None for a model without a chat template."""
    image_tokens: int = 0
    """Prompt tokens that one image takes at most; 0 if that is not known."""


def _encodable(value: object) -> object:
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_encodable).encode
decode_job = msgspec.msgpack.Decoder(GenerationJob).decode
decode_frame = msgspec.msgpack.Decoder(Frame).decode
_decode_logprobs = msgspec.msgpack.Decoder(list[TokenLogprob]).decode
decode_card = msgspec.msgpack.Decoder(WorkerCard).decode


def encode_logprobs(logprobs: Sequence[TokenLogprob]) -> bytes:
    """Return log-probabilities as messages carry them.

    A token may have twenty alternatives. Only the code that shows them decodes them. Everywhere else they are one
    object instead of many, each of which the garbage collector would visit.
    """
    return encode(logprobs) if logprobs else b""


def decode_logprobs(encoded: bytes) -> list[TokenLogprob]:
    """Return what was encoded. Raises msgspec.MsgspecError."""
    return _decode_logprobs(encoded) if encoded else []
