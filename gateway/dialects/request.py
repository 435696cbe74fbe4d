"""What every dialect is turned into before anything is looked up."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from contract.messages import Ranking
from contract.sampling import SamplingSpec
from contract.tier import ServiceTier

if TYPE_CHECKING:
    from gateway.dialects.profile import Profile

Prompt = str | list[str | int]
"""One prompt: text, or a list of token ids in which text pieces may stand."""

FIT = -1
"""Prompt tokens to keep that stand for all that leave room for the completion."""


class ContextLengthBehavior(StrEnum):
    """What happens when prompt and max_tokens together exceed the context window."""

    TRUNCATE = "truncate"  # max_tokens is lowered to what fits.
    ERROR = "error"  # The request is refused.


class StructureKind(StrEnum):
    """The languages in which a client may say what the text must match."""

    JSON_OBJECT = "json_object"  # Any JSON object; no source.
    JSON_SCHEMA = "json_schema"  # A schema as decoded JSON: an object or a boolean.
    REGEX = "regex"
    CHOICE = "choice"  # A list of strings.
    GBNF = "gbnf"  # llama.cpp's grammars.
    LARK = "lark"  # llguidance's Lark variant.
    LLGUIDANCE = "llguidance"  # llguidance's own JSON, as a string or decoded.


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text must match."""

    kind: StructureKind
    source: Any
    param: str
    """The parameter that it came in, which errors name."""


class ToolMode(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"  # As it likes.
    REQUIRED = "required"  # At least one.
    NAMED = "named"  # The one that is named.


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Any
    """JSON schema of the arguments: an object or a boolean."""
    is_strict: bool
    """Whether the arguments must match the schema."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, at least one; a request that says `tool_choice: none` has no ToolUse."""

    tools: list[Tool]
    mode: ToolMode
    name: str | None = None
    """The tool to call in mode NAMED."""
    is_parallel: bool = True
    """Whether a choice may have several calls."""

    @property
    def is_constraint(self) -> bool:
        """Whether the text is constrained, so that a model without a tool format must refuse."""
        return (
            self.mode is not ToolMode.AUTO
            or not self.is_parallel
            or any(tool.is_strict for tool in self.tools)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """An image of a chat: a file that came in a data URI, or one that is still to be fetched."""

    param: str
    """Where it stands in the body, such as `messages[0].content[1].image_url.url`."""
    file: bytes | None = None
    url: str = ""
    """As the client gave it (`gateway.images` fetches it): an http or https URL, or anything else that is no
    data URI."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning that an answer has to end before what it must match begins."""

    start: str
    """Text of the token that begins it."""
    end: str
    """Text of the token that ends it."""
    is_open: bool
    """Whether the prompt has begun it; if not, the answer may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a chat has and a completion has not."""

    messages: list[dict[str, Any]]
    """As chat templates take them (`gateway.dialects.messages`), before the content has the model's form."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """As the client described them, for the template; also where `tool_choice` is none."""
    image_sources: list[ImageSource] = field(default_factory=list)
    """Images of all messages in their order."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables of the template that the client sets, to JSON scalars."""
    argument_params: dict[str, str] = field(default_factory=dict)
    """Of each of these variables, the parameter that sets it (`gateway.dialects.template_arguments`)."""
    thinking_budget_param: str = ""
    """The parameter that gave `SamplingSpec.thinking_budget`; empty if none did."""
    continues_last_message: bool = False
    """Whether the answer goes on with the last message, which is the assistant's, instead of a new one."""
    shows_reasoning: bool = True
    uses_legacy_functions: bool = False
    """Whether the client speaks of `functions`, and is answered with a `function_call`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A completion or chat request with every default filled in."""

    profile: "Profile"
    model: str | None
    """None stands for the tenant's only or default model."""
    prompts: list[Prompt]
    """Of a chat one, empty until the messages are rendered."""
    chat: ChatRequest | None = None
    suffix: str = ""
    """What the completion leads to, or what is put behind it: see `Profile.is_suffix_literal`."""
    images: list[list[bytes]]
    """Image files for each prompt."""
    image_params: list[list[str]]
    """Where each of them stands in the body."""
    adds_special_tokens: bool = True
    """Whether the tokenizer's own tokens, such as begin-of-text, are put around text prompts."""
    prompt_tokens_kept: int | None = None
    """Last tokens of the prompt that are kept if it is too long; FIT, or None to refuse it."""
    max_tokens: int
    """Completion tokens for each choice; -1 asks for all that fit."""
    context_length_behavior: ContextLengthBehavior
    n: int
    """Choices for each prompt that are returned."""
    best_of: int
    """Sequences for each prompt that are sampled."""
    ranking: Ranking = Ranking.MEAN
    stop: list[str]
    includes_stop: bool
    logprobs: int | None
    echo: bool
    echo_last: int | None = None
    """Echo only this many of the prompt's last tokens; None echoes all (if `echo`)."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with OpenAI's extra chunk that carries only usage."""
    include_obfuscation: bool = False
    """Whether chunks are padded to hide how long their text is."""
    structure: Structure | None = None
    tool_use: ToolUse | None = None
    sampling: SamplingSpec
    bias_texts: dict[str, float] = field(default_factory=dict)
    """Biases for all tokens of a text, to be merged into `sampling.logit_bias`; minus infinity forbids them."""
    reads_prefix_cache: bool = True
    cache_isolation_key: str = ""
    """Separates prefix caches within the tenant."""
    return_token_ids: bool = False
    shows_special_tokens: bool = False
    wants_timings: bool = False
    """Whether the request asked for times, where its dialect tells them on request only."""
    timings_per_token: bool = False
    max_predict_ms: int = 0
    service_tier: ServiceTier | None = None
    """None stands for the tenant's."""
    is_background: bool = False
    """Whether it runs on though nobody waits for its answer."""
    ignored_parameters: tuple[str, ...]
    """Parameters of the body that have no effect here, to be named in the answer."""
