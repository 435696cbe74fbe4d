"""Tools of a chat, which its template describes in the prompt, and OpenAI's older `functions`."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from pydantic import Field

from gateway.dialects.chat.messages import read_object
from gateway.dialects.chat.text_tools import read_text_tool
from gateway.dialects.fields import read_list, typed
from gateway.dialects.json_types import schema_of
from gateway.dialects.profile import Profile
from gateway.dialects.request import Tool, ToolMode, ToolUse
from gateway.dialects.structured.tools import (
    CHOICE,
    FUNCTION_NAME,
    FUNCTION_SCHEMA,
    MAX_TOOLS,
    NAMED,
    ToolParameters,
    check_names,
    checked_use,
    read_function,
    read_tool,
    read_tool_choice,
)
from gateway.records.errors import invalid, must

_TEXT: Final = '{"type": "custom", "custom": {"name": str}}'
_MODE: Final = f'"mode": "auto" | "required", "tools": list[{NAMED} | {_TEXT}, 1:{MAX_TOOLS}]'
_ALLOWED: Final = (
    f'{{"type": "allowed_tools", "allowed_tools": {{{_MODE}}}}} | '
    f'{{"type": "allowed_tools", {_MODE}}}'
)
"""The forms of OpenAI and of mistral.rs."""
_NAME: Final = {"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"}
_GRAMMAR: Final = '"syntax": "lark" | "regex", "definition": str[1:]'
_FORMAT: Final = (
    f'{{"type": "text"}} | {{"type": "grammar", "grammar": {{{_GRAMMAR}}}}} | '
    f'{{"type": "grammar", {_GRAMMAR}}}'
)
_TOOLS: Final = schema_of(
    f'list[{{"type": "function", "function": function}} | {{"type": "custom", "custom": text}}, '
    f":{MAX_TOOLS}] | None",
    function=FUNCTION_SCHEMA,
    text=schema_of(
        f'{{"name": name, "description?": str | None, "format?": {_FORMAT} | None}}', name=_NAME
    ),
)


class ChatToolParameters(ToolParameters):
    """Tools that the model may call."""

    tools: Annotated[Any, Field(json_schema_extra=_TOOLS)] = None
    """Tools that the prompt describes and the model may call: functions, whose arguments match the
    schema `parameters` with `strict`, and tools of type custom, which get a free text; it matches
    the grammar of their `format`. Calls are returned in `tool_calls` of the message."""
    tool_choice: Annotated[Any, typed(f"{CHOICE} | {_TEXT} | {_ALLOWED} | None")] = None
    """`none` (the prompt describes the tools, but the response is text), `auto`, `required` or
    `any` (at least one call), `{type: function, function: {name}}` or `{type: function, name}`,
    `{type: custom, custom: {name}}`,
    `{type: allowed_tools, allowed_tools: {mode, tools}}` or, as in mistral.rs, `{type:
    allowed_tools, mode, tools}`. With `allowed_tools`, the prompt describes all tools, but the
    model may (`mode` auto) or must (required) call only those. Default: auto if there are tools,
    else none."""
    functions: Annotated[Any, typed(f"list[each, :{MAX_TOOLS}] | None", each=FUNCTION_SCHEMA)] = (
        None
    )
    """OpenAI's older form of `tools`; at most one call, returned as `function_call`."""
    function_call: Annotated[Any, typed('"none" | "auto" | {"name": str} | None')] = None
    """Choice of a function: `none`, `auto`, or `{name}`. Default: auto if there are functions."""


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a chat."""

    use: ToolUse | None
    """None if the response is not parsed for calls."""
    described: list[dict[str, Any]]
    """The tools for the template, in the form of `tools`."""
    is_legacy: bool
    """Whether the tools came as `functions`."""


def read_chat_tools(body: ChatToolParameters, profile: Profile) -> ChatTools:
    """Return the tools and how the model may use them. Raises a BadRequestError."""
    if body.tools == [] and profile.rejects_empty_values:
        raise must("tools", "have at least one tool in this dialect", [])
    for older, newer, is_both in (
        ("functions", "tools", bool(body.functions and body.tools)),
        ("functions", "tool_choice", bool(body.functions and body.tool_choice is not None)),
        ("function_call", "tools", bool(body.function_call is not None and body.tools)),
    ):
        if is_both:
            raise invalid(older, f"cannot be combined with '{newer}'.")
    if body.functions or body.function_call is not None:
        return _legacy_tools(body)
    return _tools(body)


def _tools(body: ChatToolParameters) -> ChatTools:
    listed = read_list(body.tools, "tools", most=MAX_TOOLS)
    tools, described = list[Tool](), list[dict[str, Any]]()
    texts: tuple[str, ...] = ()
    for index, each in enumerate(listed):
        match each:
            case {"type": "custom"}:
                tool, shown = _text_tool(each, f"tools[{index}]")
                texts += (tool.name,)
            case _:
                tool, shown = read_tool(each, f"tools[{index}]"), each
        tools.append(tool)
        described.append(shown)
    check_names(tools, "tools")
    allowed: tuple[str, ...] = ()
    match body.tool_choice:
        case {"type": "allowed_tools", **form}:
            mode: ToolMode | None
            mode, names = _allowed(form, {tool.name for tool in tools})
            name = None
            tools = [tool for tool in tools if tool.name in names]
            if len(tools) < len(described):
                allowed = tuple(tool.name for tool in tools)
        case {"type": "custom", "custom": {"name": str(name)}}:
            mode = ToolMode.NAMED
        case choice:
            mode, name = read_tool_choice(choice)
    is_parallel, given = body.parallel_tool_calls is not False, body.tool_choice
    use = checked_use(tools, mode, name, given=given, is_parallel=is_parallel, allowed=allowed)
    if use is not None and texts:
        use = replace(use, texts=texts)
    return ChatTools(use, described, is_legacy=False)


def _text_tool(value: dict[str, Any], path: str) -> tuple[Tool, dict[str, Any]]:
    path = f"{path}.custom"
    tool = read_object(value.get("custom"), path)
    if not isinstance(name := tool.get("name"), str) or not FUNCTION_NAME.fullmatch(name):
        raise must(f"{path}.name", "have 1 to 64 letters, digits, '_', '-' or '.'", name)
    return read_text_tool(tool, path, name)


def _allowed(form: dict[Any, Any], known: set[str]) -> tuple[ToolMode, set[str]]:
    """Return how the model may use the allowed tools, and their names."""
    path, value = "tool_choice", form
    if "allowed_tools" in form:
        path, value = f"{path}.allowed_tools", form["allowed_tools"]
    if not isinstance(value, dict):
        raise must(path, "be an object", value)
    mode = value.get("mode")
    if not isinstance(mode, str) or mode not in (ToolMode.AUTO, ToolMode.REQUIRED):
        raise must(f"{path}.mode", "be auto or required", mode)
    listed = read_list(value.get("tools"), f"{path}.tools", most=MAX_TOOLS)
    if not listed:
        raise must(f"{path}.tools", "have at least one tool", value.get("tools"))
    return ToolMode(mode), {
        _allowed_name(tool, f"{path}.tools[{index}]", known) for index, tool in enumerate(listed)
    }


def _allowed_name(value: object, path: str, known: set[str]) -> str:
    match value:
        case (
            {"type": "function", "function": {"name": str(name)}}
            | {"type": "custom", "custom": {"name": str(name)}}
            | {"type": "function", "name": str(name)}
        ) if name in known:
            return name
        case _:
            rule = "be an object of type function or custom that names one of the tools"
            raise must(path, rule, value)


def _legacy_tools(body: ChatToolParameters) -> ChatTools:
    listed = read_list(body.functions, "functions", most=MAX_TOOLS)
    tools = [
        read_function(each, f"functions[{index}]", param="functions")
        for index, each in enumerate(listed)
    ]
    check_names(tools, "functions")
    mode, name = _function_call(body.function_call)
    params, given = ("functions", "function_call"), body.function_call
    # `function_call` holds only one call.
    use = checked_use(tools, mode, name, given=given, is_parallel=False, params=params)
    described = [{"type": "function", "function": each} for each in listed]
    return ChatTools(use, described, is_legacy=bool(tools))


def _function_call(value: object) -> tuple[ToolMode | None, str | None]:
    match value:
        case None | "auto":
            return ToolMode.AUTO, None
        case "none":
            return None, None
        case {"name": str(name)}:
            return ToolMode.NAMED, name
        case _:
            raise must(
                "function_call", "be none, auto, or an object with the name of a function", value
            )
