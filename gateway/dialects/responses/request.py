"""Responses: the body of OpenAI's `POST /v1/responses`, and its `GenerationRequest`."""

from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from contract import sampling
from contract.dialect import Dialect
from gateway.dialects.bodies import SharedParameters, read_shared, shared_extra, with_one_constraint
from gateway.dialects.chat.request import LabelParameters, check_metadata
from gateway.dialects.chat.template_arguments import TemplateParameters, read_template_arguments
from gateway.dialects.chat.thinking import EFFORTS, ThinkingParameters, read_thinking
from gateway.dialects.fields import (
    COUNT,
    agreed,
    bounded,
    integer,
    one_of,
    optional_object,
    read_compared_id,
    typed,
)
from gateway.dialects.json_types import schema_of
from gateway.dialects.lengths import read_chat_max_tokens
from gateway.dialects.parameters import (
    REJECTED_BY_CHATS,
    Endpoints,
    RefusedParameter,
    is_nothing,
    rejected_by,
    unread,
)
from gateway.dialects.profile import PROFILES, ContextLengthBehavior, Profile
from gateway.dialects.request import (
    ChatRequest,
    GenerationRequest,
    ResponseForm,
    ResponsesOptions,
    Structure,
    StructureKind,
)
from gateway.dialects.responses.failures import DEFAULTS
from gateway.dialects.responses.items import PREVIOUS, Continued, read_input
from gateway.dialects.responses.tools import (
    CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    Toolbox,
    read_use,
)
from gateway.dialects.stream_options import AUTO_TIER
from gateway.dialects.structured.structures import checked_schema
from gateway.dialects.unknown_members import unread_inside
from gateway.dialects.wire import INTEGRAL, validate
from gateway.records.errors import invalid, must, unsupported

ENCRYPTED: Final = "reasoning.encrypted_content"
LOGPROBS: Final = "message.output_text.logprobs"
SUMMARIES: Final = ("auto", "concise", "detailed")
_INCLUDED: Final = (ENCRYPTED, LOGPROBS)
_FORMATS: Final = ("text", "json_object", "json_schema")
_VERBOSITIES: Final = ("low", "medium", "high")
_TRUNCATIONS: Final = ("disabled", "auto")
_NO_PROFILE: Final = PROFILES[Dialect.OPENAI]
"""The profile whose defaults are those of the API."""

_FUNCTION: Final = {"description": None, "parameters": None}
_FORMAT: Final = {"name": "", "description": None, "strict": False}
"""What a response shows of tools and of a format that lack these members."""

_ONE_CHOICE: Final = ("n", "n_cmpl")
_OF_CHATS: Final = ("logprobs", "n_probs")
_UNSERVED: Final = frozenset(
    {
        *(*_ONE_CHOICE, *_OF_CHATS, "prompt_logprobs"),
        *("return_token_ids", "return_tokens", "return_tokens_as_token_ids", "stream_options"),
        *("timings_per_token", "return_progress", "perf_metrics_in_response"),
        *("add_generation_prompt", "continue_final_message", "reasoning_effort"),
    }
)
"""Parameters of chats without which a response has one form only."""

_SERVED: Final = frozenset({"context_management", "max_output_tokens", "store"})
"""Parameters that chats reject. Here they are served, or concern only OpenAI's servers."""
REJECTED: Final = {
    **{name: row for name, row in REJECTED_BY_CHATS.items() if name not in _SERVED},
    **rejected_by(Endpoints.RESPONSES),
    **dict.fromkeys(
        (PREVIOUS, "conversation"),
        RefusedParameter(
            Endpoints.CHATS,
            (),
            "Conversations are not kept. Send the whole one as 'input', with the reasoning that "
            f"'include' ['{ENCRYPTED}'] returns.",
        ),
    ),
    "prompt": RefusedParameter(
        Endpoints.CHATS, (), "Prompts are not kept. Use 'instructions' and 'input'."
    ),
}
"""The parameters that are rejected: `previous_response_id` where responses are not kept."""


class ResponseRequest(LabelParameters, SharedParameters):
    """Body of `POST /v1/responses`. Null means absent for every parameter."""

    input: Annotated[Any, typed('str | list[{"type?": str}, 1:]')] = None
    """A text, or the items of the conversation, oldest first. Required. Items: messages of role
    user, assistant, system or developer, reasoning, calls of tools and their outputs, and
    references to items of kept responses by their id. Items of other types are left out, and so are
    calls without output and outputs without call."""
    previous_response_id: str | None = None
    """A kept response of the project, whose input and output, but not its instructions, come before
    the input. Default: none."""
    instructions: str | None = None
    """A system message before the input. Default: none."""
    max_output_tokens: Annotated[int, Field(ge=1, le=COUNT.maximum), INTEGRAL] | None = None
    """Maximum tokens to generate, including reasoning. More than fit into the context window are
    accepted; the response then ends with the window. Default: all that fit."""
    tools: Annotated[Any, Field(json_schema_extra=TOOLS_SCHEMA)] = None
    """Tools of the client: function (with `strict`, the arguments match the schema), custom (a free
    text, which matches the grammar of `format`), namespace, tool_search of execution client,
    local_shell and shell. Tools of other types are left out."""
    tool_choice: Annotated[Any, Field(json_schema_extra=CHOICE_SCHEMA)] = None
    """`none`, `auto`, `required` (at least one call), a tool by its type and name, or `{type:
    allowed_tools, mode, tools}`. Default: auto."""
    parallel_tool_calls: bool | None = None
    """Whether a response may have several calls. Default: true."""
    reasoning: Annotated[
        Any,
        typed(
            '{"effort?": effort, "summary?": summary} | None',
            effort={"enum": [*EFFORTS, None]},
            summary={"enum": [*SUMMARIES, None]},
        ),
    ] = None
    """`{effort, summary}`: `effort` as `reasoning_effort` of chats; with `summary`, the reasoning
    is returned as a summary, which is the whole reasoning."""
    text: Annotated[
        Any,
        typed(
            '{"format?": {"type": kind, "schema?": dict} | None, "verbosity?": size} | None',
            kind={"enum": list(_FORMATS)},
            size={"enum": [*_VERBOSITIES, None]},
        ),
    ] = None
    """`{format, verbosity}`: `format` of type text, json_object, or json_schema with `schema`,
    which is enforced; `verbosity` sets the variable of the chat template."""
    prompt_cache_options: Annotated[
        Any, typed('{"comparison_response_id?": str | None} | None')
    ] = None
    """`{comparison_response_id}`: name in `prompt_cache_diagnostics` the first part of the prompt
    that differs from that of an earlier response, which had this member, too, possibly null."""
    include: Any = Field(
        default=None,
        description=f"`{ENCRYPTED}` returns the reasoning sealed, too, for later requests: only "
        f"this deployment can read it; `{LOGPROBS}` returns the log-probabilities of the text's "
        "tokens. Others have no effect.",
        json_schema_extra=schema_of("list[str] | None"),
    )
    top_logprobs: Annotated[int, bounded(sampling.LOGPROBS), INTEGRAL] | None = None
    """Return log-probabilities of the text's tokens and of this many likeliest tokens. Default: 0,
    which returns none unless `include` requests them."""
    store: bool | None = None
    """Whether later requests can name the response and its items, for a limited time. Default: true
    if the deployment keeps responses."""
    truncation: str | None = None
    """`disabled`; `auto` has no effect: nothing is left out of the input."""
    max_tool_calls: int | None = None
    """No effect: it limits only tools that OpenAI's servers run."""
    chat_template_kwargs: Any = TemplateParameters.model_fields["chat_template_kwargs"]


def read_response(body: dict[str, Any], profile: Profile, *, max_prompts: int) -> GenerationRequest:
    """Return the request of a body of `POST /v1/responses`. Raises a BadRequestError."""
    del max_prompts  # A response has one prompt.
    served = {name: value for name, value in body.items() if name not in _UNSERVED}
    continued, earlier = served.pop(PREVIOUS, None), 0
    if isinstance(continued, Continued):
        served[PREVIOUS], earlier = continued
    else:
        REJECTED[PREVIOUS].check(PREVIOUS, continued)
    wire = validate(ResponseRequest, served)
    check_metadata(wire.metadata)
    # Without what a rejected parameter refers to, the input may make no sense.
    ignored = _ignored(body, wire)
    toolbox = Toolbox()
    toolbox.describe(wire.tools, "tools")
    conversation = read_input(wire.input, wire.instructions, toolbox, earlier=earlier)
    text = optional_object(wire.text, "text")
    reasoning = optional_object(wire.reasoning, "reasoning")
    thinking = read_thinking(
        ThinkingParameters(reasoning={"effort": reasoning.get("effort")}), _NO_PROFILE
    )
    max_tokens = agreed(max_output_tokens=wire.max_output_tokens, max_tokens=wire.max_tokens)
    shared = read_shared(
        wire.model_copy(
            update={
                "include_stop_str_in_output": False,
                "context_length_exceeded_behavior": ContextLengthBehavior.TRUNCATE,
            }
        ),
        _NO_PROFILE,
        max_tokens=max_tokens or read_chat_max_tokens(wire, _NO_PROFILE),
    )
    structure = shared.structure
    if (formatted := _structure(text.get("format"))) is not None:
        if structure is not None:
            raise invalid(
                "text.format",
                f"and '{structure.param}' cannot be combined: a text can have only one structure.",
                param=structure.param,
            )
        structure = formatted
    use = read_use(wire.tool_choice, toolbox, is_parallel=wire.parallel_tool_calls is not False)
    verbosity = one_of(text.get("verbosity"), "text.verbosity", _VERBOSITIES)
    template = TemplateParameters(
        chat_template_kwargs=wire.chat_template_kwargs, verbosity=verbosity
    )
    arguments, params = read_template_arguments(template, thinking)
    if params.get("verbosity") == "verbosity":
        params["verbosity"] = "text.verbosity"
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    one_of(summary, "reasoning.summary", SUMMARIES)
    one_of(wire.truncation, "truncation", _TRUNCATIONS)
    included = _included(wire.include)
    request = msgspec.structs.replace(
        shared,
        profile=profile,
        form=ResponseForm.RESPONSES,
        form_options=ResponsesOptions(
            echo=msgspec.json.encode(_echo(wire, shared, reasoning, text)),
            calls=toolbox.forms,
            wants_reasoning=bool(reasoning) and thinking.is_enabled is not False,
            has_sealed_reasoning=ENCRYPTED in included,
            has_summaries=summary is not None,
            is_kept=wire.store is not False,
        ),
        service_tier=shared.service_tier or AUTO_TIER,
        compared_id=read_compared_id(
            wire.prompt_cache_options, "prompt_cache_options", "comparison_response_id"
        ),
        chat=ChatRequest(
            messages=conversation.messages,
            param="input",
            tools=toolbox.described,
            image_sources=conversation.image_sources,
            template_arguments=arguments,
            argument_params=params,
            thinking_budget_param=thinking.budget_param,
            keeps_system_places=True,
        ),
        adds_special_tokens=False,
        logprobs=wire.top_logprobs or (0 if LOGPROBS in included else None),
        structure=structure,
        tool_use=use,
        sampling=msgspec.structs.replace(shared.sampling, thinking_budget=thinking.budget),
        ignored_parameters=tuple(sorted({*ignored, *conversation.ignored, *toolbox.ignored})),
    )
    return with_one_constraint(request)


def _structure(value: object) -> Structure | None:
    form = optional_object(value, "text.format")
    match one_of(form.get("type"), "text.format.type", _FORMATS):
        case "json_object":
            return Structure(StructureKind.JSON_OBJECT, None, "text.format")
        case "json_schema":
            schema = checked_schema(form.get("schema"), "text.format.schema")
            is_strict = form.get("strict") is True
            return Structure(
                StructureKind.JSON_SCHEMA, schema, "text.format", ".schema", is_strict=is_strict
            )
        case _:
            return None


def _included(value: object) -> list[Any]:
    if not isinstance(value, list | None) or not all(isinstance(each, str) for each in value or ()):
        raise must("include", "be an array of strings", value)
    return value or []


def _ignored(body: dict[str, Any], wire: ResponseRequest) -> list[str]:
    for name in _ONE_CHOICE:
        if body.get(name) is not None and integer(body[name]) != 1:
            raise must(name, "be 1: a response has one choice", body[name])
    for name in _OF_CHATS:
        if not is_nothing(body.get(name)) and body[name] != 0:
            raise unsupported(name, "is not supported here. Use 'top_logprobs'.")
    ignored = unread(wire.model_extra, REJECTED) + shared_extra(wire)
    others = _UNSERVED.difference(_ONE_CHOICE, _OF_CHATS)
    ignored += (name for name in others if not is_nothing(body.get(name)))
    ignored += unread_inside(wire, Endpoints.RESPONSES)
    ignored += (f"include.{each}" for each in _included(wire.include) if each not in _INCLUDED)
    if wire.truncation == "auto":
        ignored.append("truncation")
    if wire.max_tool_calls is not None:
        ignored.append("max_tool_calls")
    return ignored


def kept_options(request: GenerationRequest) -> ResponsesOptions | None:
    """Return the options of a response that is kept; None if the response is not."""
    options = request.form_options
    return options if isinstance(options, ResponsesOptions) and options.is_kept else None


def _echo(
    wire: ResponseRequest,
    shared: GenerationRequest,
    reasoning: dict[str, Any],
    text: dict[str, Any],
) -> dict[str, Any]:
    """Return the members of the response that repeat the request."""
    given = {
        "background": shared.is_background,
        "frequency_penalty": shared.sampling.frequency_penalty,
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": wire.max_tool_calls,
        "metadata": wire.metadata,
        "parallel_tool_calls": wire.parallel_tool_calls,
        "presence_penalty": shared.sampling.presence_penalty,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": wire.safety_identifier,
        "temperature": shared.sampling.temperature,
        "text": DEFAULTS["text"] | {key: each for key, each in text.items() if each},
        "tool_choice": wire.tool_choice,
        "tools": [_whole_tool(each) for each in wire.tools or ()],
        "top_logprobs": wire.top_logprobs,
        "top_p": shared.sampling.top_p,
        "truncation": wire.truncation,
        "user": wire.user,
    }
    echo = {**DEFAULTS, **{name: each for name, each in given.items() if each is not None}}
    # Whether the response is kept does not follow from the request alone.
    del echo["store"]
    if echo["text"]["format"].get("type") == "json_schema":
        form = {name: each for name, each in echo["text"]["format"].items() if each is not None}
        echo["text"]["format"] = {**_FORMAT, **form}
    match echo["tool_choice"]:
        case {"type": "allowed_tools"} as choice:
            echo["tool_choice"] = {"mode": "auto", **choice}
        case _:
            pass
    return echo


def _whole_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the members that each function of a response has."""
    match tool:
        case {"type": "namespace", "tools": list(tools)}:
            return {**tool, "tools": [_whole_tool(each) for each in tools]}
        case {"type": "function"}:
            return {**_FUNCTION, **tool, "strict": bool(tool.get("strict"))}
        case _:
            return tool
