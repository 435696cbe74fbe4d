"""Tools that the model may call, and whether it must."""

import re
from typing import Any

from pydantic import Field

from gateway.dialects.fields import Parameters, array_schema, read_list
from gateway.dialects.request import Tool, ToolMode, ToolUse
from gateway.dialects.schemas import checked_schema
from gateway.errors import InvalidParameterError, UnsupportedParameterError, shown

MAX_TOOLS = 128

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ANY_ARGUMENTS = {"type": "object"}

_TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{_FUNCTION_NAME.pattern}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "boolean", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}

TOOL_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}},
                },
            },
        },
        {"type": "null"},
    ]
}


class ToolParameters(Parameters):
    """What the model may call. The prompt is not changed: it has to tell the model of its tools."""

    tools: Any = Field(
        default=None,
        description="Functions that the model may call; with `strict` the arguments match the schema "
        "`parameters`. Calls are answered as `tool_calls` of a choice.",
        json_schema_extra=array_schema(_TOOL_SCHEMA, most=MAX_TOOLS),
    )
    tool_choice: Any = Field(
        default=None,
        description="`none`, `auto`, `required` (at least one call), or `{type: function, function: "
        "{name}}`. Default: auto if there are tools, else none.",
        json_schema_extra=TOOL_CHOICE_SCHEMA,
    )
    parallel_tool_calls: bool | None = Field(
        default=None,
        description="Whether there may be several calls; false is not supported. Default: true.",
    )


def read_tool_use(body: ToolParameters) -> ToolUse | None:
    """Return the tools and how they are to be used, None if not at all. Raises a BadRequestError."""
    tools = [_tool(item, index) for index, item in enumerate(_listed(body.tools))]
    mode, name = _choice(body.tool_choice)
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidParameterError(
            "'tools' must have functions of different names.", param="tools"
        )
    if mode in (ToolMode.REQUIRED, ToolMode.NAMED) and not tools:
        raise InvalidParameterError(
            f"'tool_choice' needs 'tools'. Given: {shown(body.tool_choice)}.", param="tool_choice"
        )
    if name is not None and name not in names:
        raise InvalidParameterError(
            f"'tool_choice' must name one of the tools. Given: {shown(name)}.", param="tool_choice"
        )
    if mode is None or not tools:
        return None
    if body.parallel_tool_calls is False:
        raise UnsupportedParameterError(
            "'parallel_tool_calls' false is not supported.", param="parallel_tool_calls"
        )
    return ToolUse(tools, mode, name)


def _listed(value: object) -> list[Any]:
    return read_list(value, "tools", most=MAX_TOOLS)


def _tool(value: object, index: int) -> Tool:
    path = f"tools[{index}]"
    if not isinstance(value, dict) or value.get("type") != "function":
        raise InvalidParameterError(
            f"'{path}' must be an object of type function. Given: {shown(value)}.", param="tools"
        )
    function = value.get("function")
    if not isinstance(function, dict):
        raise InvalidParameterError(
            f"'{path}.function' must be an object. Given: {shown(function)}.", param="tools"
        )
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        raise InvalidParameterError(
            f"'{path}.function.name' must be 1 to 64 letters, digits, '_', '-' or '.'. "
            f"Given: {shown(name)}.",
            param="tools",
        )
    is_strict = function.get("strict")
    if is_strict is not None and not isinstance(is_strict, bool):
        raise InvalidParameterError(
            f"'{path}.function.strict' must be a boolean. Given: {shown(is_strict)}.", param="tools"
        )
    parameters = checked_schema(
        _ANY_ARGUMENTS if schema is None else schema, f"{path}.function.parameters"
    )
    return Tool(name, parameters, bool(is_strict))


def _choice(value: object) -> tuple[ToolMode | None, str | None]:
    """Return the mode, None for no tools, and the name of the tool that must be called."""
    match value:
        case None | "auto":
            return ToolMode.AUTO, None
        case "none":
            return None, None
        case "required":
            return ToolMode.REQUIRED, None
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolMode.NAMED, name
        case _:
            raise InvalidParameterError(
                "'tool_choice' must be none, auto, required, or an object of type function with a function's "
                f"name. Given: {shown(value)}.",
                param="tool_choice",
            )
