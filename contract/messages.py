"""Messages between gateway and worker, and their encoding.

The gateway sends a `GenerationJob` to a worker through the queue. The worker sends back a `Frame`,
a Redis stream entry with everything that one engine step produced for one gateway. Frames are
encoded as arrays (`array_like`), because a delta is sent for every token. New fields may only be
appended, and need defaults.
"""

from array import array
from collections.abc import Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final

import msgspec

from contract.outcomes import FailureCode, FinishReason
from contract.prompts import CHUNK_TOKENS, TokenIds, decode_prompt, encode_ids
from contract.sampling import SamplingSpec
from contract.tier import ServiceTier


class Ranking(StrEnum):
    """How `best_of` compares sequences."""

    MEAN = "mean"  # By log-probability per token (OpenAI).
    SUM = "sum"  # By log-probability of the sequence; choices are always ranked (mistral.rs).


class SequenceProgress(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a job's gateway has received of one sequence."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """Set for an ended sequence, which no engine needs to continue."""
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0
    """Log-probability of these tokens, if sequences are ranked."""


class Resumption(msgspec.Struct, frozen=True, omit_defaults=True):
    """The point at which a job resumes that an earlier attempt started.

    The tokens are exactly those that the gateway received. The next attempt continues after them
    and sends none of them again.
    """

    sequences: list[SequenceProgress]
    """One for each sampled sequence: a single one if all would be equal, else `best_of`."""
    prompt_tokens: int = 0
    """As counted by the first attempt, like `cached_tokens`; 0 if it did not report them."""
    cached_tokens: int = 0
    is_prompt_scored: bool = False
    """Whether the gateway has received the prompt's log-probabilities."""
    generation_ms: float = 0.0
    """Time since the first token, summed over all earlier attempts."""


TEXT_ARGUMENT: Final = "input"
"""The only argument of a tool that takes a text."""


class Parsing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the parsers of the model's card split the text of a chat response."""

    tools: list[dict[str, Any]] = []
    """Functions that the response may call, as the client sent them; if empty, calls are text."""
    has_hermes_calls: bool = False
    """Whether tool calls have the Hermes format, whatever the model's own format is.

    The format is `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, which
    `GenerationJob.grammar` enforces.
    """
    text_tools: list[str] = []
    """Tools in whose calls TEXT_ARGUMENT is written as it is: see `worker.parsing.hermes`."""
    finds_reasoning: bool = False
    hides_special_tokens: bool = False
    """Whether the output has no special tokens and marks of calls: only parsers receive them."""
    opening_tokens: int = 0
    """Last tokens of the prompt that open the response; they show if it starts within reasoning."""
    template_arguments: dict[str, Any] = {}
    """Arguments of the chat template other than the messages, which some parsers read."""


class PoolingTask(StrEnum):
    """What a pooling model returns for each text."""

    EMBED = "embed"  # A vector.
    CLASSIFY = "classify"  # A probability for each label, or one score.


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a job computes of several inputs, in place of a completion.

    Its prompt is all inputs, one after the other. Each input is a sequence that ends without a
    token, and `Delta.pooled` has its result.
    """

    task: PoolingTask
    lengths: list[int]
    """Tokens of each input."""
    dimensions: int | None = None
    """Numbers of a vector; None: all."""
    is_activated: bool | None = None
    """Whether vectors are normalized and scores are probabilities; None: the model's default."""
    second_texts: list[int] = []
    """Token of each input at which its second text begins; empty for single texts."""


AUDIO_RATE: Final = 16_000
"""Samples of audio in a second: signed integers of 16 bits, little-endian, of one channel."""
SAMPLE_BYTES: Final = 2


class AdapterRef(msgspec.Struct, frozen=True):
    """The LoRA adapter with which a job runs."""

    digest: str
    """Identifies its files in the object store; see `contract.adapters`."""
    rank: int
    size: int
    """Bytes of its files."""


WHOLE_MODEL: Final = 100
"""Percent of an engine that a tenant without a model share may use."""


class GenerationJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt with everything a worker needs to continue it."""

    id: str
    handle: int
    """The owning gateway's number for the job, which every delta repeats."""
    gateway: str
    tenant: str
    cache_salt: str
    """Separates prefix caches: jobs share cached prompt blocks only if this value is equal."""
    prompt_token_ids: TokenIds
    max_tokens: int
    """Most completion tokens; prompt + max_tokens fits the context window. 0: score the prompt."""
    sampling: SamplingSpec
    deadline_ms: int
    """Unix time in milliseconds after which no client waits for the job."""
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
    """Whether log-probabilities of the prompt's tokens are reported."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report for each token of the prompt; None: as `logprobs`."""
    stream: bool = False
    """Whether the client streams; if not, the worker collects tokens into fewer deltas."""
    grammar: str = ""
    """What the text must match, in llguidance's Lark syntax; empty matches all.

    The gateway has already compiled it once.
    """
    reads_prefix_cache: bool = True
    shows_special_tokens: bool = False
    """Whether the text includes special tokens other than end-of-text and stop tokens."""
    max_predict_ms: int = 0
    """Time after which generation stops at the end of a line (llama.cpp's `t_max_predict_ms`).

    0 sets no limit.
    """
    images: list[bytes] = []
    """Image files, in the order of the image tokens in the prompt."""
    image_params: list[str] = []
    """Path of each image in the request body, for error messages; empty for `images[0]` etc."""
    may_shorten: bool = True
    """Whether to lower max_tokens if the prompt is too long with its images, or reject the job."""
    service_tier: ServiceTier = ServiceTier.DEFAULT
    resumption: Resumption | None = None
    is_suspect: bool = False
    """Whether an engine died while running it; until it gets a token no other suspect runs too."""
    is_background: bool = False
    """Whether another gateway takes the job over if its gateway dies."""
    adapter: AdapterRef | None = None
    """None runs the base model."""
    parsing: Parsing | None = None
    """How the text of a chat response is split; None returns the text unchanged."""
    request_id: str = ""
    """The `x-request-id` of the HTTP request, for logs and traces; empty if it has none."""
    traceparent: str = ""
    """The span of this attempt (W3C Trace Context); empty if the request is not traced."""
    earlier_traceparent: str = ""
    """The span of the previous attempt."""
    affinity: bytes = b""
    """What the job can reuse at a worker that holds it; see `contract.affinity`."""
    pooling: Pooling | None = None
    """Set for a job of a pooling model, which has no completion: `n` is the number of inputs."""
    chunks: bytes = b""
    """What `contract.prompts.names_of` returns, if Redis has the chunks of the prompt.

    Encoded and decoded jobs then have only the tokens after the chunks in `prompt_token_ids`.
    """
    model_share: int = WHOLE_MODEL
    """Most percent of an engine's sequences and KV cache that jobs of the tenant may use."""
    audio: bytes = b""
    """The samples that the job transcribes, for a model of speech; its prompt is the decoder's."""

    @property
    def rest(self) -> TokenIds:
        """The tokens of the prompt that are in no chunk."""
        ids = self.prompt_token_ids
        return ids[len(ids) - len(ids) % CHUNK_TOKENS :] if self.chunks else ids

    @property
    def is_replicated(self) -> bool:
        """Whether one sequence is used for every choice, because all would be equal."""
        return self.pooling is None and (self.sampling.is_greedy or self.max_tokens == 0)

    @property
    def is_ranked(self) -> bool:
        """Whether sequences are ranked, so that the choices are known only when all have ended."""
        is_compared = self.best_of > self.n or (self.ranking is Ranking.SUM and self.n > 1)
        return is_compared and not self.is_replicated

    @property
    def sequences(self) -> int:
        """Number of sequences to sample."""
        return 1 if self.is_replicated else self.best_of


LOGPROBS_AT_ONCE: Final = 512
"""Prompt tokens whose log-probabilities are decoded in one step of about a millisecond."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Log-probability of one token and of its most likely alternatives."""

    token: str
    logprob: float | None
    """None for the first token of a prompt, which has no predecessor."""
    offset: int
    """Offset of the token's text, in code points from the start of the prompt or completion."""
    top: list[tuple[str, float]] | None = None
    """Alternatives, most likely first, including the token itself; several may have equal text."""
    top_ids: list[int] = []
    """The token ids of `top`."""
    rank: int = 0
    """Rank of a prompt's token among all tokens, from 1."""
    parts: dict[int, bytes] = {}
    """Bytes of those tokens, by id, that are not whole characters: their text does not show them.

    Of the token itself, too, if it completes a character that other tokens began.
    """


class CallPiece(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New text of one tool call."""

    index: int
    """Index of the call within the choice, from 0."""
    name: str = ""
    """Name of the function; only in the first piece of a call."""
    arguments: str = ""
    """Next part of the arguments, JSON as the model generates it."""


class OfAttempt(msgspec.Struct, frozen=True, array_like=True):
    """A message about one attempt of a job."""

    handle: int
    attempt: int


class Delta(OfAttempt, frozen=True, omit_defaults=True):
    """New text of one choice."""

    choice: int
    """Index within the job, 0 to n - 1; of the sequence, 0 to best_of - 1, if these are ranked."""
    start: int
    """Number of earlier tokens of the choice, including those of earlier attempts."""
    text: str
    """Text for the client; if `GenerationJob.parsing` is set, only the content of the response."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id of the stop token, that ended the choice; None for end-of-text."""
    logprobs: bytes = b""
    """A `TokenLogprob` for each token, encoded by `encode_logprobs`; empty if not requested."""
    cumulative_logprob: float = 0.0
    """Log-probability of the sequence including these tokens, if sequences are ranked."""
    reasoning: str = ""
    calls: list[CallPiece] = []
    reasoning_tokens: int = 0
    """How many of the tokens are reasoning, including its start and end marks."""
    pooled: bytes = b""
    """The result of one input of `GenerationJob.pooling`: float32 numbers, little-endian."""


class JobStarted(OfAttempt, frozen=True, omit_defaults=True):
    """An engine has processed the prompt in this attempt, before it generates a token.

    Not sent for a job that is not streamed and ends in the same frame. The counts are those of the
    first attempt.
    """

    prompt_tokens: int
    cached_tokens: int
    exactness_class: str
    """Class of the engine (`Exactness.digest`)."""


class PromptScored(OfAttempt, frozen=True):
    """Log-probabilities of a prompt, sent before the first delta of its job."""

    logprobs: list[bytes]
    """One item for each LOGPROBS_AT_ONCE tokens, encoded by `encode_logprobs`."""


class JobFinished(OfAttempt, frozen=True, omit_defaults=True):
    """A job finished; the counts are the engine's."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens of all sequences, including those that `best_of` discarded."""
    cached_tokens: int
    """Prompt tokens that the engine found in its prefix cache."""
    prefill_ms: float = 0.0
    """Time from the claim to the first token."""
    generation_ms: float = 0.0
    """Time from the first token to the end."""
    chosen: list[int] = []
    """The returned sequences, the best first, if sequences are ranked; else empty."""
    engine: str = ""
    """Name and version of the engine, as in `WorkerCard.engine`."""
    exactness_class: str = ""
    """Class of the engine (`Exactness.digest`); empty if this attempt generated no token."""
    ended_at: int = 0
    """Unix time in seconds, by the worker's clock."""


class ContextExcess(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that, with its images, does not fit into the context window."""

    prompt_tokens: int
    max_tokens: int
    window: int


class JobFailed(OfAttempt, frozen=True):
    """A job ended without a result."""

    code: FailureCode
    message: str
    retry_after_seconds: float | None = None
    """Time after which a retry of a shed job may find room; None if unknown."""
    param: str | None = None
    """The parameter that the engine rejected, if known."""
    excess: ContextExcess | None = None
    """Token counts if a prompt with images exceeds the context window."""


JobMessage = Delta | PromptScored | JobStarted | JobFinished | JobFailed
"""The messages that make up the history of a job."""


class ReturnReason(StrEnum):
    """Why a worker returned an unfinished job."""

    DRAINING = "draining"  # The worker shuts down and its drain time is over.
    ENGINE_DIED = "engine_died"  # The engine died or hung while it ran the job.
    PREEMPTED = "preempted"  # It is a batch job, and requests need its room.
    ADAPTER_FAILED = "adapter_failed"  # The worker could not get the files of its adapter.
    PROMPT_LOST = "prompt_lost"  # Redis lacks chunks of its prompt, or has wrong ones.


class JobReturned(OfAttempt, frozen=True):
    """A worker returns an unfinished job. It has sent all tokens, so another worker can resume."""

    reason: ReturnReason
    has_progressed: bool
    """Whether this attempt has generated a token."""


class JobPreempted(OfAttempt, frozen=True):
    """Sequences of a job left the engine, to make room for others."""

    sequences: int
    recomputed_tokens: int
    """Their completion tokens, which an engine processes again."""


AttemptMessage = JobMessage | JobReturned | JobPreempted
"""What a worker sends about an attempt of a job."""


class JobLost(OfAttempt, frozen=True):
    """A lease expired; the gateway that detected it sends this to the gateway that owns the job."""

    model: str = ""
    """With the next two fields, identifies the job for an owner that no longer tracks it."""
    job_id: str = ""
    tenant: str = ""


class Follow(msgspec.Struct, frozen=True, array_like=True):
    """Asks the owner of a response to send `ResponseGrown` for some seconds when it grows."""

    request_id: str
    gateway: str
    """The gateway that asks."""
    handle: int
    """Number that `ResponseGrown` repeats."""
    is_over: bool = False
    """Whether this ends an earlier request to follow the response."""
    tenant: str = ""
    """The tenant of the response."""


class ResponseGrown(msgspec.Struct, frozen=True, array_like=True):
    """The journal of a followed response has new replies, or the response has ended."""

    handle: int


class CancelResponse(msgspec.Struct, frozen=True, array_like=True):
    """Asks the gateway that owns a response to end it."""

    request_id: str
    tenant: str = ""


class Frame(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """All messages from one worker to one gateway after an engine step.

    `number` counts a worker's frames to this gateway from 1 without gaps, so that the gateway
    detects a lost frame. Frames from other gateways have the number 0 and are not counted. The
    receiver applies the lists in the order of the fields. One frame holds the deltas of all choices
    that one step extended.
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
    grown: list[ResponseGrown] = []
    cancels: list[CancelResponse] = []
    taken_over: list[int] = []
    """Handles of jobs that the sender has taken over: later replies to them do not count."""
    preempted: list[JobPreempted] = []
    """Applied before all others."""


class WorkerState(StrEnum):
    """State of a worker."""

    LOADING = "loading"  # The engine is starting; the worker claims no jobs yet.
    READY = "ready"  # Claims jobs.
    DRAINING = "draining"  # Finishes its jobs and claims no more.
    RESTARTING = "restarting"  # The engine died and is restarting.
    SLEEPING = "sleeping"  # Its host uses the engine's memory for another model.


class Feature(StrEnum):
    """Capability that not every model or engine has."""

    SAMPLER_CHAIN = "sampler_chain"  # `SamplingSpec.chain`
    STRUCTURE = "structure"  # `GenerationJob.grammar`
    IMAGES = "images"  # `GenerationJob.images`
    CHAT = "chat"  # The model has a chat template: `WorkerCard.chat`.
    TOOLS = "tools"  # `Parsing.tools`
    STRICT_TOOLS = "strict_tools"  # Calls have `GenerationJob.grammar`'s form, even unforced.
    REASONING = "reasoning"  # `Parsing.finds_reasoning`
    THINKING_BUDGET = "thinking_budget"  # `SamplingSpec.thinking_budget`


class ContentFormat(StrEnum):
    """The form of message content that a chat template accepts."""

    STRING = "string"
    PARTS = "parts"  # A list of objects with a `type`.


class ChatFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The chat format of a model."""

    template_digest: str
    """SHA-256 of the chat template, under which the worker published it."""
    content_format: ContentFormat = ContentFormat.STRING
    special_tokens: dict[str, str] = {}
    """Special tokens that templates use by name, such as `bos_token`."""
    tool_parser: str = ""
    """vLLM's name of the parser; empty if tool calls are not parsed."""
    reasoning_parser: str = ""
    reasoning_start: str = ""
    """Text of the token that starts reasoning."""
    reasoning_end: str = ""
    shows_special_tokens: bool = False
    """Whether the parsers need special tokens, which only they then receive."""


class AdapterSupport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which adapters a worker serves."""

    max_rank: int
    modules_digest: str
    """SHA-256 of the shapes of the base model's modules, under which the worker published them."""
    loaded: list[str] = []
    """Digests of the adapters that its engine has loaded."""


class PairForm(StrEnum):
    """How a model that scores pairs of texts reads a pair."""

    SEPARATED = "separated"  # As the tokenizer joins two texts, such as with a separator.
    JOINED = "joined"  # One text directly after the other.


class PoolingSupport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a pooling model computes."""

    task: PoolingTask
    size: int
    """Numbers in a result: dimensions of a vector, or labels."""
    has_dimensions: bool = False
    """Whether a shorter vector can be requested (Matryoshka)."""
    dimensions: list[int] = []
    """The only lengths that can be requested; empty: any up to `size`."""
    labels: list[str] = []
    pairs: PairForm | None = None
    """Set for a classifier with one label, which scores pairs."""
    has_score_template: bool = False
    """Whether the model's chat template makes a pair one text, in place of `pairs`."""
    lowercases: bool = False
    """Whether texts are lowercased before they are tokenized."""


class Exactness(msgspec.Struct, frozen=True):
    """What an engine's results depend on beside the request.

    Engines of one class continue each other's completions as they would continue their own.
    """

    digest: str
    """The exactness class: a digest of the facts."""
    facts: dict[str, str]
    """By name, such as `dtype`."""


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
    """Most prompt and completion tokens together."""
    vocabulary_size: int = 0
    bos_token_id: int | None = None
    tokenizer_digest: str = ""
    """SHA-256 of the model's tokenizer.json, under which the worker published it."""
    max_sequences: int = 0
    kv_cache_tokens: int = 0
    features: list[Feature] = []
    aliases: list[str] = []
    """Other names of the model that clients may request."""
    dialect: str = ""
    """Dialect of requests that specify none; empty: the gateway's default."""
    eos_token_ids: list[int] = []
    image_token: str = ""
    """Text of the token that represents an image in a prompt; empty if images are unsupported."""
    max_images: int = 0
    engine_restarts: int = 0
    """How often the engine died and restarted."""
    last_failure: str = ""
    """Why the engine last died or failed to start; empty if that never happened."""
    adapters: AdapterSupport | None = None
    """None if the worker serves the base model only."""
    chat: ChatFormat | None = None
    """None for a model without a chat template."""
    image_tokens: int = 0
    """Most prompt tokens of one image; 0 if unknown."""
    cache_block_tokens: int = 0
    """Tokens of a block of the prefix cache; 0 if the worker does not publish what it holds."""
    scales_to_zero: bool = False
    """Whether a worker is started for waiting jobs if none runs."""
    load_seconds: int = 0
    """From the start of the worker until it was ready; 0 if unknown. A host announces how long its
    last swap to the model took, drain included."""
    pooling: PoolingSupport | None = None
    """Set for a model that generates no text."""
    clip_seconds: int = 0
    """Most seconds of audio in a job of a model of speech (Whisper); 0 for any other model."""
    exactness: Exactness | None = None
    """None while the engine starts."""
    inexact: str = ""
    """How the engine's results differed from those of its class when the worker last compared them;
    empty if they did not."""


_EncodedJob: Any = msgspec.defstruct(
    "_EncodedJob", [("prompt_token_ids", msgspec.Raw)], bases=(GenerationJob,), kw_only=True
)
_FIELDS: Final = GenerationJob.__struct_fields__
_values_of: Final = attrgetter(*_FIELDS)
_PROMPT, _CHUNKS = _FIELDS.index("prompt_token_ids"), _FIELDS.index("chunks")


def _encodable(value: object) -> object:
    if isinstance(value, array):
        return encode_ids(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_encodable).encode
_job_decoder: Final[Any] = msgspec.msgpack.Decoder(_EncodedJob)
decode_frame = msgspec.msgpack.Decoder(Frame).decode
_decode_logprobs = msgspec.msgpack.Decoder(list[TokenLogprob]).decode
decode_card = msgspec.msgpack.Decoder(WorkerCard).decode


def encode_job(job: GenerationJob) -> bytes:
    """Encode a job for a worker."""
    return encode(wire_form(job))


def wire_form(job: GenerationJob) -> GenerationJob:
    """Return a job to encode, without the tokens in chunks."""
    if not job.chunks:
        return job
    prompt: Any = msgspec.Raw(encode((job.chunks, job.rest)))
    return msgspec.structs.replace(job, prompt_token_ids=prompt, chunks=b"")


def decode_job(encoded: bytes | msgspec.Raw) -> GenerationJob:
    """Decode a job. Raises msgspec.MsgspecError."""
    values = [*_values_of(_job_decoder.decode(encoded))]
    values[_CHUNKS], values[_PROMPT] = decode_prompt(values[_PROMPT])
    return GenerationJob(*values)


def encode_logprobs(logprobs: Sequence[TokenLogprob]) -> bytes:
    """Encode log-probabilities for a message.

    A token may have twenty alternatives. Only the code that returns them to clients decodes them.
    Everywhere else they are a single object, which saves work of the garbage collector.
    """
    return encode(logprobs) if logprobs else b""


def decode_logprobs(encoded: bytes) -> list[TokenLogprob]:
    """Decode the result of `encode_logprobs`. Raises msgspec.MsgspecError."""
    return _decode_logprobs(encoded) if encoded else []


_TRACE_ID: Final = slice(3, 35)
"""Position of the trace id in a `traceparent`."""


def about(job: GenerationJob) -> dict[str, str]:
    """Return the `extra` of a log record about a job."""
    ids = {
        "job_id": job.id,
        "request_id": job.request_id,
        "trace_id": job.traceparent[_TRACE_ID],
    }
    return {name: value for name, value in ids.items() if value}
