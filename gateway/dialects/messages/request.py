"""Messages: the body of Anthropic's `POST /v1/messages`, and its `GenerationRequest`."""

from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from contract import sampling
from contract.dialect import Dialect
from contract.sampling import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from contract.tier import ServiceTier
from gateway.dialects.bodies import ModelNames, SharedParameters, read_shared, with_one_constraint
from gateway.dialects.chat.template_arguments import TemplateParameters, read_template_arguments
from gateway.dialects.chat.thinking import Thinking
from gateway.dialects.fields import (
    COUNT,
    Parameters,
    bounded,
    integer,
    one_of,
    optional_object,
    read_boolean,
    read_compared_id,
    read_strings,
    typed,
)
from gateway.dialects.json_types import schema_of
from gateway.dialects.messages.conversation import (
    ROLES,
    MessagesConversation,
    read_conversation,
)
from gateway.dialects.messages.edits import read_clearing
from gateway.dialects.messages.tools import (
    MAX_EXAMPLES,
    MAX_TOOLS,
    NAME,
    ToolChange,
    described,
    offered,
    read_tools,
)
from gateway.dialects.parameters import REJECTED_BY_MESSAGES, Endpoints, is_nothing, unread
from gateway.dialects.profile import PROFILES, ContextLengthBehavior, Profile
from gateway.dialects.request import (
    ChatRequest,
    GenerationRequest,
    MessagesOptions,
    ResponseForm,
    Structure,
    StructureKind,
    Tool,
    ToolMode,
    ToolUse,
)
from gateway.dialects.stream_options import AUTO_TIER, TIERS
from gateway.dialects.structured.structures import checked_schema
from gateway.dialects.structured.tools import checked_use
from gateway.dialects.unknown_members import unread_inside
from gateway.dialects.wire import INTEGRAL, validate
from gateway.records.errors import MissingParameterError, UnsupportedThreadError, must

LEAST_BUDGET: Final = 1024
"""Least tokens of a reasoning budget."""
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_TIERS: Final = {
    "auto": AUTO_TIER,
    "standard_only": ServiceTier.DEFAULT,
    **TIERS,
}
_SPEEDS: Final = ("standard", "fast")
_THINKING: Final = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
"""Whether the model should reason; None leaves the decision to its template."""
_DISPLAYS: Final = ("summarized", "omitted", "updates")
_MODES: Final = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.NAMED,
    "none": None,
}

_NO_PROFILE: Final = PROFILES[Dialect.OPENAI]
"""The profile whose defaults are those of Anthropic's API."""

_CONTENT: Final = "str | list[dict]"


class MessageRequest(Parameters):
    """Body of `POST /v1/messages`. Null means absent for every parameter."""

    model: str | None = None
    """The model, from `GET /v1/models`. Required."""
    models: ModelNames | None = None
    """Models to try in order if `model` cannot run the request, as in chats. Default: none."""
    max_tokens: Annotated[int, Field(ge=1, le=COUNT.maximum), INTEGRAL] | None = None
    """Maximum tokens to generate, including thinking. Required. More than fit into the context
    window are accepted; the response then ends with the window."""
    messages: Annotated[
        Any, typed(f'list[{{"role": role, "content": {_CONTENT}}}, 1:]', role={"enum": list(ROLES)})
    ] = None
    """The conversation, oldest message first. Required. Content is text or a list of blocks: text,
    image, document, search_result, tool_use, tool_result, thinking and redacted_thinking; in system
    messages also tool_addition and tool_removal. Of a document that is no text, the model sees its
    title, type and size. System messages keep their places. If the last message is the assistant's
    and has text, the response continues it."""
    system: Annotated[Any, typed(f"{_CONTENT} | None")] = None
    """The system prompt: text, or blocks of type text. Lines that begin with `x-anthropic-` are
    left out: they differ in each request of Claude Code."""
    stop_sequences: Annotated[
        Any, typed(f"list[str[1:{MAX_STOP_CHARACTERS}], :{MAX_STOP_STRINGS}] | None")
    ] = None
    """Strings at which generation ends; the returned text ends before them."""
    temperature: Annotated[float, bounded(sampling.TEMPERATURE)] | None = None
    """Sampling temperature. Default: 1."""
    top_p: Annotated[float, bounded(sampling.TOP_P)] | None = None
    """Keep the likeliest tokens up to this mass. Default: 1."""
    top_k: Annotated[int, bounded(sampling.TOP_K), INTEGRAL] | None = None
    """Keep this many of the likeliest tokens. Default: all."""
    stream: bool | None = None
    """Stream the response as server-sent events. Default: false."""
    thinking: Annotated[
        Any,
        typed(
            f'{{"type": kind, "budget_tokens?": int[{LEAST_BUDGET}:] | None, '
            '"display?": display} | None',
            kind={"enum": list(_THINKING)},
            display={"enum": [*_DISPLAYS, None]},
        ),
    ] = None
    """`{type, budget_tokens, display}`. `enabled` and `disabled` turn reasoning on and off, if the
    model's chat template can; others and null leave it to the template. `disabled` hides what
    reasoning there is. With display `omitted`, thinking blocks have only their signature."""
    output_config: Annotated[
        Any,
        typed(
            '{"effort?": effort, "format?": dict | None} | None', effort={"enum": [*EFFORTS, None]}
        ),
    ] = None
    """`{effort, format}`: `effort` sets the variable `reasoning_effort` of the chat template, if it
    reads it; `format` `{type: json_schema, schema}` is enforced."""
    output_format: Annotated[Any, typed("dict | None")] = None
    """The older name of `output_config.format`."""
    tools: Annotated[
        Any,
        typed(
            f'list[{{"name": name, "description?": str | None, "input_schema": dict, '
            f'"type?": "custom" | None, "strict?": bool | None, "input_examples?": examples}}, '
            f":{MAX_TOOLS}] | None",
            examples=schema_of(f"list[dict, :{MAX_EXAMPLES}] | None"),
            name={"type": "string", "pattern": f"^{NAME.pattern}$"},
        ),
    ] = None
    """Tools of the client that the model may call: `{name, description, input_schema,
    input_examples, strict}`. The model sees the examples after the description. With `strict`, the
    input matches the schema. Anthropic's own tools, which have another `type`
    than custom, are rejected."""
    tool_choice: Annotated[
        Any,
        typed(
            '{"type": kind, "name?": str | None, "disable_parallel_tool_use?": bool | None} | None',
            kind={"enum": list(_MODES)},
        ),
    ] = None
    """`{type, name, disable_parallel_tool_use}` of type auto, any (at least one call), tool (the
    named one) or none. Default: auto."""
    service_tier: str | None = None
    """`auto` (the account's tier), `standard_only`, or a tier of chats. The response names the tier
    in its usage. Default: auto."""
    speed: str | None = None
    """`fast` is the tier priority, unless `service_tier` names another; `standard` has no
    effect."""
    metadata: Annotated[Any, typed('{"user_id?": str | None} | None')] = None
    """`{user_id}`: an id of the end user, or of the session of an agent."""
    context_management: Annotated[Any, typed('{"edits?": list[dict] | None} | None')] = None
    """`{edits}`: an edit of type clear_tool_uses_20250919 replaces the results of older calls by a
    short text once the prompt is long. The response names the edits that were applied. Others have
    no effect."""
    diagnostics: Annotated[Any, typed('{"previous_message_id?": str | None} | None')] = None
    """`{previous_message_id}`: name the first part of the prompt that differs from that of an
    earlier message, which had `diagnostics`, too; null for the first message."""
    cache_control: Any = None
    """No effect, here and in blocks: requests with a common prefix share cached work
    automatically."""


def read_message(body: dict[str, Any], profile: Profile, *, max_prompts: int) -> GenerationRequest:
    """Return the request of a body of `POST /v1/messages`. Raises a BadRequestError."""
    del max_prompts  # A message has one prompt.
    wire = validate(MessageRequest, body)
    if wire.max_tokens is None:
        raise MissingParameterError("max_tokens")
    return _read(wire, profile, max_tokens=wire.max_tokens)


def read_counted_message(
    body: dict[str, Any], profile: Profile, *, max_prompts: int
) -> GenerationRequest:
    """Return the request whose prompt is counted; `max_tokens` has no effect."""
    del max_prompts
    request = _read(validate(MessageRequest, body | {"max_tokens": None}), profile, max_tokens=1)
    if body.get("max_tokens") is None:
        return request
    ignored = tuple(sorted({*request.ignored_parameters, "max_tokens"}))
    return msgspec.structs.replace(request, ignored_parameters=ignored)


def _read(wire: MessageRequest, profile: Profile, *, max_tokens: int) -> GenerationRequest:
    tools = read_tools(wire.tools)
    conversation = read_conversation(wire.system, wire.messages, has_tools=bool(tools))
    for name in ("metadata", "output_config", "thinking", "tool_choice"):
        optional_object(getattr(wire, name), name)
    shared = read_shared(
        SharedParameters(
            model=wire.model,
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_k=wire.top_k,
            stream=wire.stream,
            include_stop_str_in_output=False,
            context_length_exceeded_behavior=ContextLengthBehavior.TRUNCATE,
        ),
        _NO_PROFILE,
        max_tokens=max_tokens,
    )
    thinking = _thinking(wire, max_tokens=max_tokens)
    extra = {name: each for name, each in (wire.model_extra or {}).items() if not is_nothing(each)}
    if "thread" in extra:
        reason = REJECTED_BY_MESSAGES["thread"].reason
        raise UnsupportedThreadError(f"'thread' is not supported. {reason}", param="thread")
    ignored = [*unread(extra, REJECTED_BY_MESSAGES), *conversation.ignored]
    ignored += unread_inside(wire, Endpoints.MESSAGES)
    clearing = read_clearing(wire.context_management, ignored)
    request = msgspec.structs.replace(
        shared,
        profile=profile,
        form=ResponseForm.MESSAGES,
        form_options=MessagesOptions(
            omits_thinking=(wire.thinking or {}).get("display") == "omitted"
        ),
        chat=replace(_chat(wire, conversation, thinking), clearing=clearing),
        adds_special_tokens=False,
        stop=read_strings(
            wire.stop_sequences,
            "stop_sequences",
            most=MAX_STOP_STRINGS,
            longest=MAX_STOP_CHARACTERS,
        ),
        structure=_structure(wire),
        tool_use=_tool_use(tools, conversation.tool_changes, wire.tool_choice),
        sampling=msgspec.structs.replace(shared.sampling, thinking_budget=thinking.budget),
        service_tier=_tier(wire),
        compared_id=read_compared_id(wire.diagnostics, "diagnostics", "previous_message_id"),
        ignored_parameters=tuple(sorted(ignored)),
    )
    return with_one_constraint(request)


def _chat(
    wire: MessageRequest, conversation: MessagesConversation, thinking: Thinking
) -> ChatRequest:
    arguments, params = read_template_arguments(TemplateParameters(), thinking)
    return ChatRequest(
        messages=conversation.messages,
        tools=[described(tool) for tool in wire.tools or ()] or conversation.more_tools,
        image_sources=conversation.image_sources,
        template_arguments=arguments,
        argument_params=params,
        thinking_budget_param=thinking.budget_param,
        continues_last_message=(
            conversation.ends_with_text_of_assistant and conversation.messages[-1]["content"] != ""
        ),
        shows_reasoning=thinking.is_shown,
        keeps_system_places=True,
    )


def _thinking(wire: MessageRequest, *, max_tokens: int) -> Thinking:
    thinking, config = wire.thinking or {}, wire.output_config or {}
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if thinking and not (isinstance(kind, str) and kind in _THINKING):
        raise must("thinking.type", f"be one of {', '.join(_THINKING)}", kind)
    effort = one_of(config.get("effort"), "output_config.effort", EFFORTS)
    one_of(thinking.get("display"), "thinking.display", _DISPLAYS)
    if budget is not None:
        budget = integer(budget)
        if budget is None or budget < LEAST_BUDGET:
            rule = f"be an integer of at least {LEAST_BUDGET}"
            raise must("thinking.budget_tokens", rule, thinking["budget_tokens"])
        # With interleaved thinking, clients send the budget of a whole turn.
        budget = min(budget, max_tokens)
    elif kind == "enabled":
        raise MissingParameterError("thinking.budget_tokens")
    is_enabled = _THINKING[kind] if kind else None
    return Thinking(
        budget=budget if is_enabled else None,
        budget_param="thinking.budget_tokens" if is_enabled else "",
        effort=effort,
        effort_param="output_config.effort",
        is_enabled=is_enabled,
        switch_param="thinking.type",
        is_shown=is_enabled is not False,
    )


def _tier(wire: MessageRequest) -> str:
    tier = _TIERS[one_of(wire.service_tier, "service_tier", _TIERS) or "auto"]
    is_fast = one_of(wire.speed, "speed", _SPEEDS) == "fast" and tier == AUTO_TIER
    return ServiceTier.PRIORITY if is_fast else tier


def _structure(wire: MessageRequest) -> Structure | None:
    param, value = "output_config.format", (wire.output_config or {}).get("format")
    if value is None:
        param, value = "output_format", wire.output_format
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise must(param, "be an object of type json_schema", value)
    schema = checked_schema(value.get("schema"), f"{param}.schema")
    return Structure(StructureKind.JSON_SCHEMA, schema, param, ".schema")


def _tool_use(declared: list[Tool], changes: list[ToolChange], value: object) -> ToolUse | None:
    tools, allowed = offered(declared, changes)
    choice = {"type": "auto"} if value is None else optional_object(value, "tool_choice")
    kind, path = choice.get("type"), "tool_choice.disable_parallel_tool_use"
    if not (isinstance(kind, str) and kind in _MODES):
        raise must("tool_choice.type", f"be one of {', '.join(_MODES)}", kind)
    mode, name = _MODES[kind], None
    is_single = read_boolean(choice.get("disable_parallel_tool_use"), path)
    if mode is ToolMode.NAMED and not isinstance(name := choice.get("name"), str):
        raise must("tool_choice.name", "be a string", name)
    is_parallel = not is_single
    return checked_use(tools, mode, name, given=value, is_parallel=is_parallel, allowed=allowed)
