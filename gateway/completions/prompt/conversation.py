"""Convert chat messages and tools to the form that the model's chat template takes, as in vLLM.

Steps that do not depend on the model are done earlier (`gateway.dialects.chat.messages`).
"""

import itertools
import re
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Any, Final

from contract.messages import ContentFormat
from gateway.completions.prompt.templates.environment import WrittenArguments
from gateway.dialects.wire import WrittenObject

Message = Mapping[str, Any]

_PART_SEPARATOR: Final = "\n"
_SYSTEM_SEPARATOR: Final = "\n\n"
_MISTRAL_ID_CHARACTERS: Final = 9
_TEXT_END: Final = f"END_OF_TEXT_{token_hex()}"
"""Marks where a text ends. What templates write after it ends the JSON that the text replaces."""
_JSON_END: Final = re.compile(rf"{_TEXT_END}\}}?\n?")


def image_count(message: Message) -> int:
    """Return the number of images in a message."""
    return sum(part["type"] == "image" for part in _parts(message["content"]))


def for_template(
    messages: list[Message],
    form: ContentFormat,
    *,
    image_token: str,
    tool_parser: str,
    has_developer_role: bool,
    text_tools: frozenset[str] = frozenset(),
) -> list[dict[str, Any]]:
    """Return messages in the template's form; the given messages are not modified.

    Args:
        messages: The client's messages, already validated.
        form: The form in which the template takes content.
        image_token: The text that represents an image in string content.
        tool_parser: vLLM's name of the parser; it determines the form of call ids.
        has_developer_role: Whether the template has a developer role. If not, developer messages
            become system messages, and all system messages are merged into one at the front.
        text_tools: The tools whose only argument is written as it is.
    """
    converted = [
        {**message, "content": _content(message, form, image_token)} for message in messages
    ]
    _name_calls(converted, tool_parser, text_tools)
    has_developer = any(message["role"] == "developer" for message in converted)
    return converted if has_developer_role or not has_developer else _as_system(converted)


def with_systems_in_place(
    messages: list[Message], *, has_developer_role: bool, takes_later_system: Callable[[], bool]
) -> list[Message]:
    """Return messages whose system and developer messages the template takes where they are.

    A system message that the template takes only at the front becomes one of a user, and joins its
    neighbors: a moved message would change the beginning of the prompt, which is in the cache.
    """
    roles = [message["role"] for message in messages]
    if not has_developer_role:
        roles = ["system" if role == "developer" else role for role in roles]
    if "system" in roles[1:] and not takes_later_system():
        roles[1:] = ["user" if role == "system" else role for role in roles[1:]]
    placed: list[Message] = []
    is_joining = False
    """Whether the last message was one of the system."""
    for message, role in zip(messages, roles, strict=True):
        is_new = role == "user" != message["role"]
        if (is_new or is_joining) and placed and role == "user" == placed[-1]["role"]:
            content = [*_parts(placed[-1]["content"]), *_parts(message["content"])]
            placed[-1] = {**placed[-1], "content": content}
        else:
            placed.append(message if role == message["role"] else {**message, "role": role})
        is_joining = is_new
    return placed


def tools_for_template(tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return tools with their fields in vLLM's order, which affects the prompt; None if empty."""
    return [_tool(tool) for tool in tools] or None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    # The order of the fields affects the prompt, and so does a missing description.
    described = {key: function.get(key) for key in ("name", "description", "parameters")}
    if (strict := function.get("strict")) is not None:
        described["strict"] = strict
    return {"type": "function", "function": described}


def _content(message: Message, form: ContentFormat, image_token: str) -> Any:
    content = message["content"]
    if message["role"] == "tool":
        # Few templates accept parts in a tool result.
        return content
    if form is ContentFormat.PARTS:
        return _parts(content)
    marks = [image_token] * image_count(message)
    written = _joined(content)
    return _PART_SEPARATOR.join([*marks, written] if written else marks)


def _parts(content: Any) -> list[Message]:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def without_json_ends(text: str) -> str:
    """Return a prompt without the ends of the JSON around arguments that are written as texts."""
    return _JSON_END.sub("", text)


def _name_calls(
    messages: list[dict[str, Any]], tool_parser: str, text_tools: frozenset[str]
) -> None:
    """Give calls ids of the form that the model was trained on and its template may require."""
    known: dict[str, str] = {}
    numbers = itertools.count()
    for message in messages:
        if calls := message.get("tool_calls"):
            named = [
                {
                    **call,
                    "id": _call_id(call, next(numbers), tool_parser),
                    "function": _function(call["function"], text_tools),
                }
                for call in calls
            ]
            message["tool_calls"] = named
            known |= {one["id"]: other["id"] for one, other in zip(calls, named, strict=True)}
        if "tool_call_id" in message:
            message["tool_call_id"] = known.get(message["tool_call_id"], message["tool_call_id"])


def _function(function: Mapping[str, Any], text_tools: frozenset[str]) -> Mapping[str, Any]:
    values: dict[str, Any] | None = None
    match function:
        case {"arguments": str(written)}:
            pass
        case {"name": name, "arguments": {"input": str(text)}} if name in text_tools:
            written = text + _TEXT_END
        case {"arguments": WrittenObject() as values}:
            written = values.text
        case _:
            return function
    return {**function, "arguments": WrittenArguments(written, values)}


def _call_id(call: Mapping[str, Any], number: int, tool_parser: str) -> str:
    own: str = call["id"]
    match tool_parser:
        case "mistral":
            return own[-_MISTRAL_ID_CHARACTERS:]
        case "kimi_k2":
            return f"functions.{call['function']['name']}:{number}"
        case _:
            return own


def _as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with all system and developer messages merged into one at the front."""
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    if len(systems) == 1 and messages[0] is systems[0]:
        return [{**systems[0], "role": "system"}, *others]
    written = [text for message in systems if (text := _joined(message["content"]))]
    return [{"role": "system", "content": _SYSTEM_SEPARATOR.join(written)}, *others]


def _joined(content: Any) -> str:
    texts = [part["text"] for part in _parts(content) if part["type"] == "text"]
    return _PART_SEPARATOR.join(texts)
