"""Tools of Anthropic's Messages, and their changes within a conversation."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gateway.dialects.chat.messages import MAX_NAME_CHARACTERS, read_object, required_text
from gateway.dialects.fields import read_list, required
from gateway.dialects.parameters import Endpoints
from gateway.dialects.request import Tool
from gateway.dialects.structured.structures import checked_schema
from gateway.dialects.structured.tools import check_members, check_names
from gateway.dialects.unknown_members import OBJECTS
from gateway.records.errors import must, shown, unsupported

MAX_TOOLS: Final = 1024
"""Agents send the tools of all their MCP servers."""
MAX_EXAMPLES: Final = 64
"""Most examples of one tool's input."""
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")

_MEMBERS: Final = OBJECTS[Endpoints.MESSAGES]["tools[]"]


class ToolChange(NamedTuple):
    """A tool that a conversation offers from some place on, or no longer offers."""

    name: str
    place: str
    """The place of the name in the body."""
    is_added: bool
    tool: Tool | None = None
    """None if the tool was defined before."""


def read_tools(value: object) -> list[Tool]:
    """Return the tools of a request. Raises a BadRequestError."""
    listed = read_list(value, "tools", most=MAX_TOOLS)
    tools = [read_tool(each, f"tools[{index}]") for index, each in enumerate(listed)]
    check_names(tools, "tools")
    return tools


def read_tool(value: object, path: str) -> Tool:
    """Return the tool that is defined at a place. Raises a BadRequestError."""
    tool = read_object(value, path)
    name, kind = tool.get("name"), tool.get("type")
    if kind not in (None, "custom"):
        raise unsupported(
            f"{path}.type",
            "must be custom: tools that Anthropic defines are not available here. Describe the "
            f"tool {shown(name)} by an 'input_schema'. Given: {shown(kind)}.",
        )
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise must(f"{path}.name", "have 1 to 128 letters, digits, '_' or '-'", name)
    check_members(tool, path)
    place = f"{path}.input_examples"
    examples = read_list(tool.get("input_examples"), place, most=MAX_EXAMPLES)
    for index, each in enumerate(examples):
        read_object(each, f"{place}[{index}]")
    schema, place = required(tool, "input_schema", path), f"{path}.input_schema"
    return Tool(name, checked_schema(schema, place), bool(tool.get("strict")), place)


def described(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool for the template, in the form of chats."""
    description = tool.get("description")
    if examples := tool.get("input_examples"):
        # Templates have no place for examples.
        shown_examples = (json.dumps(each, ensure_ascii=False) for each in examples)
        description = "\n".join([description or "", "Examples of the input:", *shown_examples])
    function = {
        "name": tool["name"],
        "description": description,
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def read_changes(
    block: dict[str, Any], path: str, ignored: list[str]
) -> tuple[list[ToolChange], list[dict[str, Any]]]:
    """Return the changes of a block, and the descriptions of the tools that it defines.

    A block has one `tool`, or in the form of 2026-07-01 a list `tools`. Raises a BadRequestError.
    """
    is_added = block["type"] == "tool_addition"
    given = [(block.get("tool"), f"{path}.tool")]
    if block.get("tools") is not None:
        listed = read_list(block["tools"], f"{path}.tools", most=MAX_TOOLS)
        given = [(each, f"{path}.tools[{index}]") for index, each in enumerate(listed)]
    changes, definitions = list[ToolChange](), list[dict[str, Any]]()
    for value, place in given:
        tool = read_object(value, place)
        kind, at = tool.get("type"), place
        if is_added and kind == "tool_definition":
            at = f"{place}.definition"
            tool = read_object(tool.get("definition"), at)
        elif not is_added or kind == "tool_reference" or "input_schema" not in tool:
            if kind not in (None, "tool_reference"):
                kinds = ["tool_reference", *["tool_definition"] * is_added]
                rule = f"must be one of {', '.join(kinds)}. Given: {shown(kind)}."
                raise unsupported(f"{place}.type", rule)
            name = required_text(tool, "name", place, most=MAX_NAME_CHARACTERS)
            changes.append(ToolChange(name, f"{place}.name", is_added))
            continue
        read = read_tool(tool, at)
        _MEMBERS.check(tool, at, ignored)
        changes.append(ToolChange(read.name, f"{at}.name", is_added, read))
        definitions.append(described(tool))
    return changes, definitions


def text_of_changes(changes: Sequence[ToolChange], definitions: Sequence[dict[str, Any]]) -> str:
    """Return what the model reads about changes at their place in the conversation."""
    lines = ["These tools are available, too:"] * bool(definitions)
    lines += (json.dumps(each, ensure_ascii=False) for each in definitions)
    for is_added, text in ((True, "available now"), (False, "no longer available")):
        names = [each.name for each in changes if each.is_added is is_added and not each.tool]
        lines += [f"These tools are {text}: {', '.join(names)}"] * bool(names)
    return "\n".join(lines)


def offered(
    tools: Sequence[Tool], changes: Sequence[ToolChange]
) -> tuple[list[Tool], tuple[str, ...]]:
    """Return the tools that are offered in the end, and their names if others are described, too.

    Raises InvalidParameterError for a change of an unknown tool.
    """
    known = {tool.name: tool for tool in tools}
    names = dict.fromkeys(known)
    for name, place, is_added, tool in changes:
        if tool is not None:
            known[name] = tool
        elif name not in known:
            raise must(place, "name a tool that was defined before", name)
        if is_added:
            names[name] = None
        else:
            names.pop(name, None)
    if len(known) > MAX_TOOLS:
        raise must("messages", f"define at most {MAX_TOOLS} tools with 'tools'", len(known))
    return [known[name] for name in names], tuple(names) if len(names) < len(known) else ()
