"""Tools: functions that the model may call, and `tool_choice`."""

import re
from typing import Annotated, Any, Final

from pydantic import Field

from gateway.dialects.fields import Parameters, read_list, typed
from gateway.dialects.json_types import schema_of
from gateway.dialects.request import Tool, ToolMode, ToolUse
from gateway.dialects.structured.structures import checked_schema
from gateway.records.errors import invalid, must, shown

MAX_TOOLS = 128

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}

FUNCTION_SCHEMA: Final = schema_of(
    """{
        "name": name,
        "description?": str | None,
        "parameters?": dict | bool | None,
        "strict?": bool | None,
    }""",
    name={"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"},
)
TOOLS_SCHEMA: Final = schema_of(
    f'list[{{"type": "function", "function": function}}, :{MAX_TOOLS}] | None',
    function=FUNCTION_SCHEMA,
)
NAMED: Final = '{"type": "function", "function": {"name": str}} | {"type": "function", "name": str}'
CHOICE: Final = f'"none" | "auto" | "required" | "any" | {NAMED}'


class ToolParameters(Parameters):
    """Tools that the model may call. The prompt is unchanged: it must describe the tools itself."""

    tools: Annotated[Any, Field(json_schema_extra=TOOLS_SCHEMA)] = None
    """Functions that the model may call; with `strict`, the arguments match the schema
    `parameters`. Calls are returned in `tool_calls` of a choice."""
    tool_choice: Annotated[Any, typed(f"{CHOICE} | None")] = None
    """`none`, `auto`, `required` or `any` (at least one call), `{type: function, function: {name}}`
    or `{type: function, name}`. Default: auto if there are tools, else none."""
    parallel_tool_calls: bool | None = None
    """Whether a choice may have several calls. Default: true."""


def read_tool_use(body: ToolParameters) -> ToolUse | None:
    """Return the tools and how the model may use them, or None. Raises a BadRequestError."""
    tools = read_tools(body.tools)
    mode, name = read_tool_choice(body.tool_choice)
    is_parallel = body.parallel_tool_calls is not False
    return checked_use(tools, mode, name, given=body.tool_choice, is_parallel=is_parallel)


def read_tools(value: object) -> list[Tool]:
    """Return the functions in `tools`. Raises a BadRequestError."""
    listed = read_list(value, "tools", most=MAX_TOOLS)
    tools = [read_tool(item, f"tools[{index}]") for index, item in enumerate(listed)]
    check_names(tools, "tools")
    return tools


def read_function(value: object, path: str, *, param: str) -> Tool:
    """Return the function described at `path`.

    Raises InvalidParameterError, which names `param`.
    """
    if not isinstance(value, dict):
        raise must(path, "be an object", value, param=param)
    name, schema = value.get("name"), value.get("parameters")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise must(
            f"{path}.name", "have 1 to 64 letters, digits, '_', '-' or '.'", name, param=param
        )
    check_members(value, path, param=param)
    place = f"{path}.parameters"
    parameters = checked_schema(_NO_ARGUMENTS if schema is None else schema, place)
    return Tool(name, parameters, bool(value.get("strict")), place)


def check_members(tool: dict[str, Any], path: str, *, param: str | None = None) -> None:
    """Raise InvalidParameterError if a tool's description or `strict` has another type."""
    for member, kind, described in (("description", str, "string"), ("strict", bool, "boolean")):
        if not isinstance(given := tool.get(member), kind | None):
            raise must(f"{path}.{member}", f"be a {described}", given, param=param)


def check_names(tools: list[Tool], param: str) -> None:
    """Raise InvalidParameterError if two functions have the same name."""
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid(param, "must have functions with different names.")


def checked_use(
    tools: list[Tool],
    mode: ToolMode | None,
    name: str | None,
    *,
    given: object,
    is_parallel: bool,
    allowed: tuple[str, ...] = (),
    params: tuple[str, str] = ("tools", "tool_choice"),
) -> ToolUse | None:
    """Return how the model may use the tools; None if it may not, or if there are none.

    `params` are the names of the tools parameter and of the choice parameter; `given` is the
    client's value of the choice. Raises InvalidParameterError if a call is forced but no tool
    matches it.
    """
    of_tools, of_choice = params
    if mode in (ToolMode.REQUIRED, ToolMode.NAMED) and not tools:
        raise invalid(of_choice, f"requires '{of_tools}'. Given: {shown(given)}.")
    if name is not None and name not in {tool.name for tool in tools}:
        raise must(of_choice, f"name one of the {of_tools}", name)
    if mode is None or not tools:
        return None
    return ToolUse(tools, mode, name, is_parallel=is_parallel, allowed=allowed)


def read_tool_choice(value: object) -> tuple[ToolMode | None, str | None]:
    """Return the mode, None for no tools, and the name of the tool that must be called."""
    match value:
        case None | "auto":
            return ToolMode.AUTO, None
        case "none":
            return None, None
        case "required" | "any":
            return ToolMode.REQUIRED, None
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            return ToolMode.NAMED, name
        case _:
            rule = "be none, auto, required, any, or an object of type function with the name of a"
            raise must("tool_choice", f"{rule} function", value)


def read_tool(value: object, path: str) -> Tool:
    """Return the function that is the tool at `path`. Raises InvalidParameterError."""
    if not isinstance(value, dict) or value.get("type") != "function":
        raise must(path, "be an object of type function", value, param="tools")
    return read_function(value.get("function"), f"{path}.function", param="tools")
