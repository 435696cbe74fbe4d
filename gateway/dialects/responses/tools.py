"""Tools of Responses: functions, free texts, namespaces, and tools that clients run themselves.

The model sees every tool as a function. The functions of a namespace get the names
`NAMESPACE__FUNCTION`, and a free text is the only argument of its function.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.dialects.chat.messages import read_object, read_text
from gateway.dialects.chat.text_tools import read_text_tool
from gateway.dialects.fields import read_boolean, read_list, required
from gateway.dialects.json_types import schema_of
from gateway.dialects.parameters import Endpoints
from gateway.dialects.request import (
    CallForm,
    CallKind,
    Tool,
    ToolMode,
    ToolUse,
)
from gateway.dialects.structured.structures import checked_schema
from gateway.dialects.structured.tools import check_names, checked_use
from gateway.dialects.unknown_members import by_type, name_once
from gateway.records.errors import MissingParameterError, must

MAX_TOOLS: Final = 1024
"""Agents send the tools of all their MCP servers."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "properties": {}}
_STRINGS: Final = {"type": "array", "items": {"type": "string"}}
_SHELLS: Final[Mapping[str, dict[str, Any]]] = {
    "local_shell": {
        "name": "local_shell",
        "description": "Runs a program on the user's machine and returns its output.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": _STRINGS | {"description": "The program and its arguments."},
                "working_directory": {"type": "string"},
                "timeout_ms": {"type": "integer"},
            },
            "required": ["command"],
        },
    },
    "shell": {
        "name": "shell",
        "description": "Runs shell commands on the user's machine and returns their output.",
        "parameters": {
            "type": "object",
            "properties": {"commands": _STRINGS, "timeout_ms": {"type": "integer"}},
            "required": ["commands"],
        },
    },
}
"""What the model sees of tools whose type alone describes them."""

_MEMBERS: Final = by_type(Endpoints.RESPONSES, "tools[]")
"""By the type of a tool. Tools of other types are ignored as a whole."""

TOOLS_SCHEMA: Final = schema_of(
    f'list[{{"type": str, "name?": str, "description?": str | None, "parameters?": dict | None, '
    f'"strict?": bool | None, "format?": dict | None, "tools?": list[dict]}}, :{MAX_TOOLS}] | None'
)
CHOICE_SCHEMA: Final = schema_of('"none" | "auto" | "required" | {"type": str} | None')


@dataclass(slots=True)
class Toolbox:
    """The tools of a request, those in its input included."""

    tools: list[Tool] = field(default_factory=list)
    """All tools that may be called."""
    described: list[dict[str, Any]] = field(default_factory=list)
    """Tools for the template, in the form of chats."""
    forms: dict[str, CallForm] = field(default_factory=dict)
    """How calls appear in the response, by the model's names of the tools."""
    ignored: list[str] = field(default_factory=list)
    _is_complete: bool = False
    """Whether `tools` of the body has been read."""

    def describe(self, value: object, path: str) -> None:
        """Read `tools` of the body, which the template describes. Raises a BadRequestError."""
        self.described = self.add(value, path)
        check_names(self.tools, path)
        self._is_complete = True

    def add(self, value: object, path: str) -> list[dict[str, Any]]:
        """Read tools, and return their descriptions. A tool that was read before stays as it was.

        Raises a BadRequestError.
        """
        listed = read_list(value, path, most=MAX_TOOLS)
        return [
            described
            for index, each in enumerate(listed)
            for described in self._read(each, f"{path}[{index}]")
        ]

    def _read(self, value: object, path: str, namespace: str = "") -> list[dict[str, Any]]:
        tool = read_object(value, path)
        kind = tool.get("type")
        if isinstance(kind, str) and kind in _MEMBERS:
            _MEMBERS[kind].check(tool, path, self.ignored)
        match kind:
            case None:
                raise MissingParameterError(f"{path}.type")
            case "function":
                return [self._add(CallKind.FUNCTION, tool, path, namespace)]
            case "custom":
                return [self._add_text(tool, path, namespace)]
            case "namespace" if not namespace:
                return self._namespace(tool, path)
            case "tool_search" if tool.get("execution") == "client":
                return [self._add(CallKind.TOOL_SEARCH, {**tool, "name": "tool_search"}, path)]
            case "local_shell" | "shell":
                return [self._add(CallKind(f"{kind}_call"), _SHELLS[kind], path)]
            case str():
                name_once(f"tools.{kind}", self.ignored)
                return []
            case _:
                raise must(f"{path}.type", "be a string", kind, param="tools")

    def _namespace(self, tool: dict[str, Any], path: str) -> list[dict[str, Any]]:
        name, about = _name(tool, path), read_text(tool, "description", path)
        listed = read_list(tool.get("tools"), f"{path}.tools", most=MAX_TOOLS)
        described = [
            function
            for index, each in enumerate(listed)
            for function in self._read(each, f"{path}.tools[{index}]", name)
        ]
        if about and described:
            # Templates have no place for a namespace. Once is enough.
            first = described[0]["function"]
            first["description"] = "\n".join(filter(None, (about, first["description"])))
        return described

    def _add(
        self, kind: CallKind, tool: dict[str, Any], path: str, namespace: str = ""
    ) -> dict[str, Any]:
        name, description = _name(tool, path), read_text(tool, "description", path)
        place, strict = f"{path}.parameters", read_boolean(tool.get("strict"), f"{path}.strict")
        given = tool.get("parameters")
        schema = checked_schema(_NO_ARGUMENTS if given is None else given, place)
        flat = flat_name(name, namespace)
        self._keep(Tool(flat, schema, bool(strict), place), CallForm(kind, name, namespace))
        function = {"name": flat, "description": description, "parameters": schema}
        return {"type": "function", "function": function}

    def _add_text(self, tool: dict[str, Any], path: str, namespace: str) -> dict[str, Any]:
        name = _name(tool, path)
        read, described = read_text_tool(tool, path, flat_name(name, namespace))
        self._keep(read, CallForm(CallKind.CUSTOM, name, namespace))
        return described

    def _keep(self, tool: Tool, form: CallForm) -> None:
        if not (self._is_complete and tool.name in self.forms):
            self.tools.append(tool)
            self.forms[tool.name] = form


def flat_name(name: str, namespace: str = "") -> str:
    """Return the name by which the model knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def read_use(value: object, toolbox: Toolbox, *, is_parallel: bool) -> ToolUse | None:
    """Return how the model may use the tools, from `tool_choice`. Raises a BadRequestError."""
    tools, allowed = toolbox.tools, tuple[str, ...]()
    mode: ToolMode | None
    name, names = None, set[str]()
    match value:
        case "none":
            mode = None
        case None | "auto":
            mode = ToolMode.AUTO
        case "required":
            mode = ToolMode.REQUIRED
        case {"type": "allowed_tools", **allowing}:
            mode, names = _allowed(allowing, toolbox)
        case {"type": str()}:
            mode, names = ToolMode.REQUIRED, _chosen(value, "tool_choice", toolbox)
            if len(names) == 1:
                mode, (name,) = ToolMode.NAMED, names
        case _:
            rule = "be none, auto, required, or an object with the type and name of a tool"
            raise must("tool_choice", rule, value)
    if names and name is None:
        allowed = tuple(names) if len(names) < len(tools) else ()
        tools = [tool for tool in tools if tool.name in names]
    return checked_use(tools, mode, name, given=value, is_parallel=is_parallel, allowed=allowed)


def _allowed(choice: dict[Any, Any], toolbox: Toolbox) -> tuple[ToolMode, set[str]]:
    mode = choice.get("mode", "auto")
    if mode not in (ToolMode.AUTO, ToolMode.REQUIRED):
        raise must("tool_choice.mode", "be auto or required", mode)
    path = "tool_choice.tools"
    listed = read_list(choice.get("tools"), path, most=MAX_TOOLS)
    found = [_chosen(each, f"{path}[{index}]", toolbox) for index, each in enumerate(listed)]
    if not (names := set[str]().union(*found)):
        raise must(path, "have at least one tool", choice.get("tools"))
    return ToolMode(mode), names


def _chosen(value: object, path: str, toolbox: Toolbox) -> set[str]:
    """Return the model's names of the tool, or tools of a namespace, that a client selects."""
    forms, flat, names = toolbox.forms, "", set[str]()
    match value:
        case {"type": "namespace", "name": str(namespace)}:
            names = {each for each, form in forms.items() if form.namespace == namespace}
        case {"name": str(name), "namespace": str(namespace)}:
            flat = flat_name(name, namespace)
        case {"name": str(flat)}:
            # OpenAI's type has no member for the namespace.
            names = {each for each, form in forms.items() if form.name == flat}
            if len(names) > 1 and flat not in forms:
                rule = "have a 'namespace': several have a tool of this name"
                raise must(path, rule, value)
        case {"type": str(flat)}:
            pass
        case _:
            pass
    names = {flat} if flat in forms else names
    if not names:
        raise must(path, "select one of the tools by its type and name", value)
    return names


def _name(tool: Mapping[str, Any], path: str) -> str:
    name = required(tool, "name", path)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise must(f"{path}.name", "have 1 to 128 letters, digits, '_', '-' or '.'", name)
    return name
