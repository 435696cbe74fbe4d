"""`GenerationRequest`: the common form of requests in every dialect."""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec

from contract.messages import AUDIO_RATE, Ranking
from contract.sampling import SamplingSpec
from gateway.dialects.profile import ContextLengthBehavior, Profile
from gateway.records.records import PromptLog

Prompt = str | list[str | int]
"""One prompt: text, or a list of token ids that may contain text pieces."""

FIT = -1
"""The value of `prompt_tokens_kept` that keeps as many as leave room for the completion."""


class StructureKind(StrEnum):
    """The languages in which a client may specify what the text must match."""

    JSON_OBJECT = "json_object"  # Any JSON object; no source.
    JSON_SCHEMA = "json_schema"  # A schema as decoded JSON: an object or a boolean.
    REGEX = "regex"
    CHOICE = "choice"  # A list of strings.
    GBNF = "gbnf"  # llama.cpp's grammars.
    LARK = "lark"  # llguidance's Lark variant.
    LLGUIDANCE = "llguidance"  # llguidance's own JSON, as a string or decoded.


class ResponseForm(StrEnum):
    """The API in whose form a request is answered."""

    OPENAI = "openai"  # Completions and chats.
    NATIVE = "native"  # llama.cpp's own form of a completion.
    MESSAGES = "messages"  # Anthropic's Messages.
    RESPONSES = "responses"  # OpenAI's Responses.
    POOLED = "pooled"  # Vectors, labels, scores or ranks.
    SPEECH = "speech"  # The text of audio.


class CacheMiss(StrEnum):
    """What a prompt has changed of the one with which it is compared, as Anthropic calls it."""

    NONE = ""  # It begins with the whole of the other prompt.
    MODEL = "model_changed"
    SYSTEM = "system_changed"
    TOOLS = "tools_changed"
    MESSAGES = "messages_changed"
    NOT_FOUND = "previous_message_not_found"
    UNAVAILABLE = "unavailable"


CACHE_CHANGES: Final = {
    CacheMiss.MODEL: "model_changed",
    CacheMiss.SYSTEM: "input_changed",
    CacheMiss.TOOLS: "tools_changed",
    CacheMiss.MESSAGES: "input_changed",
}
"""Changes of the parts of a prompt in their order, and what OpenAI calls them."""


class CachePlace(StrEnum):
    """Where the repeated beginning of a prompt was when the request arrived."""

    UNKNOWN = ""  # The engines of the model do not say what they hold.
    WORKER = "other_worker"  # A worker held it. It is another one if the request does not find it.
    EVICTED = "evicted"  # No worker held it any more.
    NOT_CACHED = "not_cached"  # It is shorter than what engines keep.


class CacheDiagnosis(msgspec.Struct, frozen=True, array_like=True):
    """How a prompt compares with an earlier one."""

    miss: CacheMiss
    tokens: int = 0
    """The most tokens that the cache could have had of it."""
    place: CachePlace = CachePlace.UNKNOWN
    """If nothing changed."""

    def not_found(self, cached_tokens: int) -> dict[str, Any]:
        """Return why, and how many, tokens of an unchanged prompt were not found in the cache."""
        if self.place is CachePlace.UNKNOWN or cached_tokens >= self.tokens:
            return {}
        return {"detail": self.place, "tokens": self.tokens - cached_tokens}


class MessagesOptions(msgspec.Struct, frozen=True, omit_defaults=True, tag="messages"):
    """What a response in Anthropic's form needs of its request."""

    omits_thinking: bool = False
    """Whether thinking blocks have only a signature."""
    applied_edits: list[dict[str, Any]] | None = None
    """The edits that changed the conversation; None if the request has none."""


class CallKind(StrEnum):
    """The types of items in which Responses returns calls."""

    FUNCTION = "function_call"
    CUSTOM = "custom_tool_call"  # Its argument is a text.
    TOOL_SEARCH = "tool_search_call"
    LOCAL_SHELL = "local_shell_call"
    SHELL = "shell_call"


class CallForm(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How Responses returns the calls of a tool."""

    kind: CallKind
    name: str
    """The client's name of the tool."""
    namespace: str = ""


class ResponsesOptions(msgspec.Struct, frozen=True, omit_defaults=True, tag="responses"):
    """What a response in the form of OpenAI's Responses needs of its request."""

    echo: bytes = b"{}"
    """A JSON object: the members of a response that repeat those of the request."""
    calls: dict[str, CallForm] = {}
    """How to return calls, by the model's names of the tools."""
    wants_reasoning: bool = False
    """Whether there is an item of reasoning even if the model wrote none."""
    has_sealed_reasoning: bool = False
    has_summaries: bool = False
    """Whether reasoning is returned as a summary, and not as content."""
    is_kept: bool = False
    """Whether later requests can name the response and its items."""


LANGUAGE: Final = re.compile("[a-z]{2,3}")
"""A language of audio, in ISO 639."""


class SpeechFormat(StrEnum):
    """The formats of transcriptions."""

    JSON = "json"
    TEXT = "text"
    SRT = "srt"
    VERBOSE_JSON = "verbose_json"
    VTT = "vtt"


class SpeechOptions(msgspec.Struct, frozen=True, omit_defaults=True, tag="speech"):
    """What a transcription needs of its request."""

    format: SpeechFormat
    is_translated: bool = False
    """Whether the text is English, whatever the language of the audio."""
    language: str = ""
    """As the client gave it; empty if the model detects it."""
    ends: list[int] = []
    """Samples of audio until the end of each clip; empty until the audio is decoded."""
    first_time: int = 0
    """The model's token for the time 0, which those of later times follow."""

    @property
    def has_times(self) -> bool:
        """Whether the model writes the times of segments."""
        return self.format not in (SpeechFormat.JSON, SpeechFormat.TEXT)

    @property
    def starts(self) -> list[int]:
        """Samples of audio before each clip."""
        return [0, *self.ends[:-1]]

    @property
    def seconds_of_clips(self) -> list[int]:
        """Seconds to be paid for each clip: together those of the audio, rounded up once."""
        marks = [-(-each // AUDIO_RATE) for each in (0, *self.ends)]
        return [end - start for start, end in pairwise(marks)]

    @property
    def seconds(self) -> int:
        """Seconds of audio, rounded up."""
        return sum(self.seconds_of_clips)


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text must match."""

    kind: StructureKind
    source: Any
    param: str
    """The parameter that contains it."""
    path: str = field(default="", compare=False)
    """Path from the parameter to the source, such as `.json_schema`."""
    is_strict: bool = True
    """Whether a schema that cannot be enforced completely is rejected."""

    @property
    def place(self) -> str:
        """The source's place in the body; errors about the source name it."""
        return self.param + self.path


class ToolMode(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"  # The model decides.
    REQUIRED = "required"  # At least one call.
    NAMED = "named"  # The named tool.


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Any
    """JSON schema of the arguments: an object or a boolean."""
    is_strict: bool
    """Whether the arguments must match the schema."""
    place: str = field(default="tools", compare=False)
    """The schema's place in the body; errors about the schema name it."""
    grammar: Structure | None = None
    """What its only argument, a text, must match; None if the schema says all."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, at least one; with `tool_choice: none` there is no ToolUse."""

    tools: list[Tool]
    """The tools that may be called."""
    mode: ToolMode
    name: str | None = None
    """The tool to call in mode NAMED."""
    is_parallel: bool = True
    """Whether a choice may have several calls."""
    allowed: tuple[str, ...] = ()
    """Names of `tools`, if the prompt also describes tools that must not be called; else empty."""
    texts: tuple[str, ...] = ()
    """Names of the tools of a chat whose calls are returned as texts, not as JSON."""

    @property
    def param(self) -> str:
        """The parameter that contains the tools."""
        return self.tools[0].place.partition("[")[0]

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        is_named = self.mode is ToolMode.NAMED
        return [tool for tool in self.tools if not is_named or tool.name == self.name]

    @property
    def is_forced(self) -> bool:
        """Whether the response is calls and nothing else, except for reasoning."""
        return self.mode is not ToolMode.AUTO

    def is_exact(self, tool: Tool) -> bool:
        """Whether the arguments of a tool match its schema."""
        return tool.is_strict or self.is_forced

    @property
    def is_constraint(self) -> bool:
        """Whether the text is constrained; then a model without a tool format must reject it."""
        return (
            self.is_forced
            or not self.is_parallel
            or bool(self.allowed)
            or any(tool.is_strict or tool.grammar for tool in self.tools)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """An image of a chat: a file from a data URI, or an image still to be fetched."""

    param: str
    """Its place in the body, such as `messages[0].content[1].image_url.url`."""
    file: bytes | None = None
    url: str = ""
    """As the client gave it: an http or https URL, which the gateway fetches, or any other string
    that is not a data URI."""
    is_of_tool: bool = field(default=False, compare=False)
    """Whether it is in the result of a tool."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning that must end before the constrained part of a response begins."""

    start: str
    """Text of the token that begins the reasoning."""
    end: str
    """Text of the token that ends the reasoning."""
    is_open: bool
    """Whether the prompt has begun the reasoning; if not, the response may."""


class Sealed(NamedTuple):
    """Reasoning as `gateway.completions.sealing` has sealed it for the client."""

    text: str
    place: str
    """Its place in the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolClearing:
    """An edit of a conversation: when to clear the results of tools, and which."""

    trigger: int
    """The conversation is edited if it has more tokens, or more results."""
    is_triggered_by_uses: bool
    kept: int
    """The latest results that are kept."""
    at_least: int
    """The edit is left out if it clears fewer tokens."""
    excluded: frozenset[str]
    """Tools whose results are kept."""
    inputs: bool | frozenset[str]
    """Whether the inputs of the calls are cleared, too, or of which tools."""


SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which templates of different models turn reasoning on and off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """The parts of a chat that a completion does not have."""

    messages: list[dict[str, Any]]
    """In the form of `gateway.dialects.chat.messages`, before content gets the model's form.

    An assistant's message may have `sealed`, its reasoning in order: texts, and Sealed ones."""
    param: str = "messages"
    """The parameter that contains them."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """As the client described them, for the template; present even if `tool_choice` is none."""
    image_sources: list[ImageSource] = field(default_factory=list)
    """Images of all messages in order."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Template variables that the client sets; values are JSON scalars."""
    argument_params: dict[str, str] = field(default_factory=dict)
    """The parameter that sets each variable (`gateway.dialects.chat.template_arguments`)."""
    thinking_budget_param: str = ""
    """The parameter that gave `SamplingSpec.thinking_budget`; empty if none did."""
    parses_special_tokens: bool = False
    """Whether the text of a special token in the messages is that token."""
    continues_last_message: bool = False
    """Whether the response continues the last message, an assistant's, instead of a new one."""
    keeps_system_places: bool = False
    """Whether system and developer messages keep their places, even as messages of a user if the
    template takes none there."""
    opens_message: bool = True
    """Whether the prompt ends with the beginning of a new message, if none is continued."""
    shows_reasoning: bool = True
    clearing: ToolClearing | None = None
    """The edit of the messages that the size of the prompt triggers."""
    uses_legacy_functions: bool = False
    """Whether the client uses `functions` and gets a `function_call` in the response."""


class PoolingKind(StrEnum):
    """The endpoints of pooling models."""

    EMBEDDINGS = "embeddings"
    CLASSIFY = "classify"
    SCORE = "score"
    RERANK = "rerank"


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parts of a request to a pooling model that a completion does not have.

    The prompts of the request are its inputs until they are prepared, and then those of its jobs,
    each of which has several inputs.
    """

    kind: PoolingKind
    param: str = "input"
    """The parameter that contains the inputs, or the documents of a comparison."""
    query_param: str = ""
    """The parameter that contains the queries of a comparison; empty for other kinds."""
    queries: int = 0
    """How many of the inputs, the first ones, are queries."""
    most_query_tokens: int = 0
    """Tokens to keep of each query; 0: all."""
    most_document_tokens: int = 0
    dimensions: int | None = None
    is_activated: bool | None = None
    """Whether vectors are normalized and scores are probabilities; None: the model's default."""
    is_base64: bool = False
    """Whether vectors are in base64 (float32, little-endian) and not arrays of numbers."""
    top_n: int = 0
    """Results of `rerank`; 0: all."""
    documents: list[str] = []
    """Texts that the results of `rerank` contain; empty if they contain none."""
    groups: list[int] = []
    """How many inputs each job has."""
    labels: list[str] = []
    """The model's labels, for `classify`."""
    instruction: str | None = None
    """A variable of the score template, unless `template_arguments` has it."""
    template_arguments: dict[str, Any] = {}
    compares_vectors: bool = False
    """Whether a score is the similarity of two vectors, and not the model's result for a pair."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request with every default filled in: a completion, a chat, or one to a pooling model."""

    profile: Profile
    model: str | None
    """None means the tenant's only or default model."""
    prompts: list[Prompt]
    """For a chat, one prompt, which is empty until the messages are rendered."""
    chat: ChatRequest | None = None
    pooling: PoolingRequest | None = None
    suffix: str = ""
    """The target of infill, or the text to append: see `Profile.is_suffix_literal`."""
    infill_files: list[tuple[str, str]] | None = None
    """Name and text of each file before the prefix, in llama.cpp's `/infill`; None elsewhere."""
    form: ResponseForm = ResponseForm.OPENAI
    form_options: MessagesOptions | ResponsesOptions | SpeechOptions | None = None
    """The options of forms that have some."""
    compared_id: str | None = None
    """The response with whose prompt the cache diagnostics compare this one; empty: none, but a
    later one may name this response; None: nothing is compared."""
    cache_diagnosis: CacheDiagnosis | None = None
    prompt_log: PromptLog | None = None
    """How the tenant's prompt log has the request; None: it does not."""
    sealed_for: str = ""
    """The model to which the reasoning of the response is sealed; empty if none is sealed."""
    response_fields: tuple[str, ...] = ()
    """Paths of the only members of a native response, such as `timings/prompt_n`; empty for all."""
    images: list[list[bytes]]
    """Image files for each prompt."""
    image_params: list[list[str]]
    """The place of each image in the body."""
    audio: list[bytes] = []
    """The file to be transcribed, and when it is decoded, the samples for each prompt."""
    adds_special_tokens: bool = True
    """Whether text prompts get the tokenizer's own tokens, such as begin-of-text."""
    parses_special_tokens: bool = True
    """Whether the text of a special token in a completion's prompt is that token."""
    prompt_tokens_kept: int | None = None
    """Tokens to keep of a prompt that is too long; FIT, or None to reject the prompt."""
    keeps_prompt_start: bool = False
    """Whether the first tokens of such a prompt are kept, and not the last ones."""
    max_tokens: int
    """Maximum completion tokens for each choice; -1 means all that fit."""
    max_tokens_param: str = "max_tokens"
    """The name by which the client gives `max_tokens`, for errors."""
    context_length_behavior: ContextLengthBehavior
    n: int = 1
    """Returned choices for each prompt."""
    best_of: int = 1
    """Sampled sequences for each prompt."""
    ranking: Ranking = Ranking.MEAN
    stop: list[str] = []
    includes_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Alternatives to return for each token of the prompt; None returns nothing."""
    has_scored_objects: bool = False
    """Whether log-probabilities of a completion are objects as in chats, and not lists."""
    names_tokens_by_id: bool = False
    """Whether log-probabilities call tokens `token_id:N`, and not by their texts."""
    echo: bool = False
    echo_last: int | None = None
    """Echo only this many of the prompt's last tokens; None echoes all (if `echo`)."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with OpenAI's extra chunk that carries only usage."""
    hides_usage: bool = False
    """Whether a stream has no usage at all."""
    continuous_usage: bool = False
    """Whether every chunk with a choice has the usage of that choice so far."""
    include_obfuscation: bool = False
    """Whether chunks are padded to hide the length of their text."""
    structure: Structure | None = None
    tool_use: ToolUse | None = None
    sampling: SamplingSpec
    bias_texts: dict[str, float] = {}
    """Biases for all tokens of a text, merged into `sampling.logit_bias`; -inf forbids them."""
    reads_prefix_cache: bool = True
    cache_isolation_key: str = ""
    """Separates prefix caches within the tenant."""
    return_token_ids: bool = False
    shows_special_tokens: bool = False
    wants_timings: bool = False
    """Whether the request asked for timings, in a dialect that returns them only on request."""
    timings_per_token: bool = False
    reports_progress: bool = False
    """Whether a stream reports when the prompt was processed (llama.cpp's `return_progress`)."""
    max_predict_ms: int = 0
    service_tier: str | None = None
    """The ServiceTier that the response names, or `auto` before it is known; None: the tenant's,
    which the response does not name."""
    is_background: bool = False
    """Whether the request continues to run after the client disconnects."""
    ignored_parameters: tuple[str, ...]
    """Parameters of the body that have no effect here; the response names them."""

    @property
    def is_native(self) -> bool:
        """Whether the response has llama.cpp's own form (`rendering.native`), not OpenAI's."""
        return self.form is ResponseForm.NATIVE

    @property
    def speech(self) -> SpeechOptions:
        """The options of a transcription."""
        assert isinstance(self.form_options, SpeechOptions)  # noqa: S101 - it is the form
        return self.form_options

    @property
    def is_sliceable(self) -> bool:
        """Whether the gateway sees how many tokens are generated while the request runs."""
        return self.stream and self.best_of == self.n and self.ranking is Ranking.MEAN

    @property
    def reports_probabilities(self) -> bool:
        """Whether log-probabilities are those after the samplers (`post_sampling_probs`)."""
        chain = self.sampling.chain
        return chain is not None and chain.reports_probabilities

    @property
    def tools_param(self) -> str:
        """The parameter that contains the tools."""
        return "functions" if self.chat and self.chat.uses_legacy_functions else "tools"

    @property
    def tool_choice_param(self) -> str:
        """The parameter that selects which tool is called."""
        return "tool_choice" if self.tools_param == "tools" else "function_call"

    @property
    def infill_param(self) -> str:
        """The parameter that requests infill; empty if none does."""
        if self.infill_files is not None:
            return "input_suffix"
        return "suffix" if self.suffix and not self.profile.is_suffix_literal else ""

    @property
    def echoes_logprobs(self) -> bool:
        """Whether `logprobs` cover the echoed prompt."""
        return self.echo and self.logprobs is not None

    @property
    def scored_alternatives(self) -> int | None:
        """Alternatives that a worker scores for each token of the prompt; None scores nothing."""
        echoed = self.logprobs if self.echo else None
        if self.prompt_logprobs is None or echoed is None:
            return echoed if self.prompt_logprobs is None else self.prompt_logprobs
        return max(self.prompt_logprobs, echoed)
