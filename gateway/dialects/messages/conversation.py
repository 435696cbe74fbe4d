"""Conversations of Anthropic's Messages, converted to the form of `gateway.dialects.chat.messages`.

A message of the API may become several: each tool result becomes a message of role tool, in its
place. Neighbors of one role become one message. System messages keep their places.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from gateway.dialects.chat.messages import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    MAX_PARTS,
    Conversation,
    add_image,
    join_reasoning,
    read_object,
    read_text,
    required_text,
)
from gateway.dialects.fields import one_of, read_boolean, read_list, required
from gateway.dialects.images import SIGNATURES
from gateway.dialects.json_styles import restyled
from gateway.dialects.messages.tools import ToolChange, read_changes, text_of_changes
from gateway.dialects.parameters import Endpoints, unread_file
from gateway.dialects.request import Sealed
from gateway.dialects.unknown_members import by_type, name_once
from gateway.records.errors import MissingParameterError, must, shown, unsupported

ROLES: Final = ("user", "assistant", "system")

_ATTRIBUTION: Final = re.compile(r"(?:x-anthropic-[^\n]*(?:\n|$))+")
"""Lines that Claude Code puts before the system prompt. They differ in each request, so a prompt
that begins with them is never in a prefix cache."""
_ERROR: Final = "Error: "
"""Precedes the text of a tool result that `is_error`: templates have no mark for errors."""

_BLOCK_MEMBERS: Final = by_type(Endpoints.MESSAGES, "content[]")

_OF_SYSTEM: Final = ("text",)
_OF_SYSTEM_MESSAGES: Final = ("text", "tool_addition", "tool_removal")
_CLEARED: Final = ("next_user_message", "never")
_OF_DOCUMENTS: Final = ("text", "image")
_OF_RESULTS: Final = ("text", "image", "document", "search_result", "tool_reference")
_OF_USERS: Final = ("text", "image", "document", "search_result", "tool_result")
_OF_ASSISTANTS: Final = ("text", "thinking", "redacted_thinking", "tool_use")

_Part = dict[str, str]


class MessagesConversation(Conversation):
    """A conversation of Messages, which may change the tools."""

    def __init__(self) -> None:
        super().__init__()
        self.tool_changes: list[ToolChange] = []
        self.more_tools: list[dict[str, Any]] = []
        """Descriptions of the tools that messages define, unless the messages contain them."""


def read_conversation(system: object, messages: object, *, has_tools: bool) -> MessagesConversation:
    """Return the conversation. Raises a BadRequestError that names the first invalid place.

    If the request `has_tools`, messages contain the descriptions of those that they add: the
    beginning of the prompt, with the request's tools, stays as it was.
    """
    if messages is None:
        raise MissingParameterError("messages")
    listed = read_list(messages, "messages", most=MAX_MESSAGES)
    of_users = (
        index
        for index in range(len(listed) - 1, -1, -1)
        if isinstance(listed[index], dict) and listed[index].get("role") == "user"
    )
    reader = _Reader(has_tools=has_tools)
    if system is not None:
        reader.read_system(system, "system")
    last_of_user = next(of_users, -1)
    for index, message in enumerate(listed):
        reader.read_message(message, f"messages[{index}]", is_past=index < last_of_user)
    conversation = reader.finished()
    if not messages or not conversation.messages:
        raise must("messages", "have at least one message with content", messages)
    return conversation


class _Reader:
    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._conversation = MessagesConversation()
        self._messages = self._conversation.messages

    def finished(self) -> MessagesConversation:
        """Return the conversation, in which content of one text is that text."""
        for message in self._messages:
            join_reasoning(message)
            parts = message["content"]
            if parts == []:
                message["content"] = None if "tool_calls" in message else ""
            elif isinstance(parts, list) and len(parts) == 1 and "text" in parts[0]:
                message["content"] = parts[0]["text"]
        return self._conversation

    def read_message(self, value: object, path: str, *, is_past: bool) -> None:
        """Read a message, which `is_past` if a later one is of the user."""
        message = read_object(value, path)
        role, content = (required(message, name, path) for name in ("role", "content"))
        path = f"{path}.content"
        match role:
            case "user":
                self._read_user(content, path)
            case "assistant":
                self._read_assistant(content, path)
            case "system":
                place = path.replace(".content", ".clear_at")
                until = one_of(message.get("clear_at"), place, _CLEARED)
                is_hidden = is_past and until == _CLEARED[0]
                self._read_system_message(content, path, is_hidden=is_hidden)
            case _:
                raise must(path.replace(".content", ".role"), _one_of(ROLES), role)

    def _read_system_message(self, content: object, path: str, *, is_hidden: bool) -> None:
        """Read a system message, which may change the tools."""
        if not isinstance(content, list):
            self.read_system([] if is_hidden else content, path)
            return
        texts, conversation = list[Any](), self._conversation
        for index, each in enumerate(_blocks(content, path)):
            place = f"{path}[{index}]"
            block, kind = self._block(each, place, _OF_SYSTEM_MESSAGES)
            if kind == "text":
                text = required_text(block, "text", place)
                texts += [] if is_hidden else [{"type": "text", "text": text}]
                continue
            changes, definitions = read_changes(block, place, conversation.ignored)
            conversation.tool_changes += changes
            if not self._has_tools:
                conversation.more_tools += definitions
                definitions = []
            if text := text_of_changes(changes, definitions):
                texts.append({"type": "text", "text": text})
        self.read_system(texts, path)

    def read_system(self, content: object, path: str) -> None:
        """Read the system prompt, or a system message."""
        parts = self._parts(content, path, _OF_SYSTEM)
        for part in parts:
            if lines := _ATTRIBUTION.match(part["text"]):
                part["text"] = part["text"][lines.end() :]
        if parts := [part for part in parts if part["text"]]:
            self._message("system")["content"] += parts

    def _read_user(self, content: object, path: str) -> None:
        if not isinstance(content, list):
            self._message("user")["content"] += self._parts(content, path, _OF_USERS)
            return
        shown_by_tools: list[_Part] = []
        """Images of tool results: templates accept images in user messages only."""
        for index, each in enumerate(_blocks(content, path)):
            place = f"{path}[{index}]"
            block, kind = self._block(each, place, _OF_USERS)
            if kind == "tool_result":
                shown_by_tools += self._read_result(block, place)
                continue
            parts = self._parts_of(block, kind, place)
            self._message("user")["content"] += [*shown_by_tools, *parts]
            shown_by_tools = []
        if shown_by_tools or not content:
            self._message("user")["content"] += shown_by_tools

    def _read_result(self, block: dict[str, Any], path: str) -> list[_Part]:
        """Add a tool's result as a message, and return its images."""
        call = required_text(block, "tool_use_id", path, most=MAX_NAME_CHARACTERS)
        content = block.get("content")
        is_error = read_boolean(block.get("is_error"), f"{path}.is_error")
        self._conversation.is_in_result = True
        parts = [] if content is None else self._parts(content, f"{path}.content", _OF_RESULTS)
        self._conversation.is_in_result = False
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        result = {"role": "tool", "content": f"{_ERROR * bool(is_error)}{text}"}
        self._messages.append({**result, "tool_call_id": call})
        return [part for part in parts if part["type"] == "image"]

    def _read_assistant(self, content: object, path: str) -> None:
        message = self._message("assistant")
        if not isinstance(content, list):
            message["content"] += self._parts(content, path, _OF_ASSISTANTS)
            return
        for index, each in enumerate(_blocks(content, path)):
            place = f"{path}[{index}]"
            if _is_of_servers(each):
                name_once(f"messages.{each['type']}", self._conversation.ignored)
                continue
            block, kind = self._block(each, place, _OF_ASSISTANTS)
            if kind == "tool_use":
                calls = message.setdefault("tool_calls", [])
                if len(calls) == MAX_CALLS:
                    raise must(path, f"have at most {MAX_CALLS} calls", len(calls) + 1)
                calls.append(_call(block, place))
            elif kind == "text":
                message["content"] += self._parts_of(block, kind, place)
            else:
                _add_reasoning(message, block, kind, place)

    def _message(self, role: str) -> dict[str, Any]:
        """Return the message that content of a role continues; a new one after other roles."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]

    def _parts(self, content: object, path: str, kinds: Sequence[str]) -> list[_Part]:
        """Return the parts of a text or of blocks."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if content else []
        parts: list[_Part] = []
        for index, each in enumerate(_blocks(content, path)):
            block, kind = self._block(each, f"{path}[{index}]", kinds)
            parts += self._parts_of(block, kind, f"{path}[{index}]")
        return parts

    def _block(self, value: object, path: str, kinds: Sequence[str]) -> tuple[dict[str, Any], str]:
        """Return a block and its type, which must be one of `kinds`."""
        block = read_object(value, path)
        kind = required(block, "type", path)
        if not isinstance(kind, str) or kind not in kinds:
            raise unsupported(f"{path}.type", f"must {_one_of(kinds)} here. Given: {shown(kind)}.")
        _BLOCK_MEMBERS[kind].check(block, path, self._conversation.ignored)
        return block, kind

    def _parts_of(self, block: dict[str, Any], kind: str, path: str) -> list[_Part]:
        """Return the parts of a block that has text or images."""
        if kind == "image":
            self._add_image(block.get("source"), f"{path}.source")
            return [{"type": "image"}]
        if kind == "document":
            return _titled(block, path, self._document(block.get("source"), f"{path}.source"))
        if kind == "search_result":
            parts = self._parts(block.get("content"), f"{path}.content", _OF_SYSTEM)
            return _titled(block, path, parts, "source")
        name = "tool_name" if kind == "tool_reference" else "text"
        text = required_text(block, name, path)
        return [{"type": "text", "text": text}] if text else []

    def _document(self, value: object, path: str) -> list[_Part]:
        source = read_object(value, path)
        match source.get("type"):
            case "text":
                text = read_text(source, "data", path)
                return [{"type": "text", "text": text}] if text else []
            case "content":
                return self._parts(source.get("content"), f"{path}.content", _OF_DOCUMENTS)
            case "base64" | "url" as kind:
                name_once("messages.document", self._conversation.ignored)
                data = required_text(source, "data" if kind == "base64" else "url", path)
                media = read_text(source, "media_type", path)
                known = {"data": data} if kind == "base64" else {"name": data}
                return [{"type": "text", "text": unread_file(media, **known)}]
            case kind:
                raise unsupported(
                    f"{path}.type",
                    "must be one of text, content, base64, url: files are not kept here. Given: "
                    f"{shown(kind)}. Send the document's text, or images of its pages.",
                )

    def _add_image(self, value: object, path: str) -> None:
        source = read_object(value, path)
        match source.get("type"):
            case "base64":
                kind = source.get("media_type")
                if not isinstance(kind, str) or kind not in SIGNATURES:
                    raise must(f"{path}.media_type", _one_of([*SIGNATURES]), kind)
                data = required_text(source, "data", path)
                add_image(f"data:{kind};base64,{data}", f"{path}.data", self._conversation)
            case "url":
                add_image(source.get("url"), f"{path}.url", self._conversation)
            case kind:
                raise must(f"{path}.type", _one_of(("base64", "url")), kind)


def _blocks(content: object, path: str) -> list[Any]:
    if content is None:
        raise MissingParameterError(path)
    if not isinstance(content, list):
        raise must(path, "be a string or an array of blocks", content)
    return read_list(content, path, most=MAX_PARTS)


def _is_of_servers(value: object) -> bool:
    """Whether a block of an assistant is of a tool that ran on another server, or is unknown."""
    kind = value.get("type") if isinstance(value, dict) else None
    return isinstance(kind, str) and kind not in _BLOCK_MEMBERS


def _titled(
    block: dict[str, Any], path: str, parts: list[_Part], also: str = "context"
) -> list[_Part]:
    """Return the parts of a block after its title and another text about it."""
    about = [read_text(block, name, path) for name in ("title", also)]
    return [*({"type": "text", "text": text} for text in about if text), *parts]


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    call, name = (
        required_text(block, each, path, most=MAX_NAME_CHARACTERS) for each in ("id", "name")
    )
    arguments = read_object(required(block, "input", path), f"{path}.input")
    # In vLLM's order, as in chats.
    function = {"arguments": restyled(arguments, call), "name": name}
    return {"id": call, "function": function, "type": "function"}


def _add_reasoning(message: dict[str, Any], block: dict[str, Any], kind: str, path: str) -> None:
    """Add reasoning as text if the block has text; else as it was sealed, which is opened later."""
    if kind == "thinking":
        name, text = "signature", required_text(block, "thinking", path)
        sealed = read_text(block, name, path)
    else:
        name, text = "data", ""
        sealed = required_text(block, name, path)
    if text or sealed:
        part = text or Sealed(sealed or "", f"{path}.{name}")
        message.setdefault("reasoning", []).append(part)


def _one_of(names: Sequence[str]) -> str:
    return f"be one of {', '.join(names)}" if len(names) > 1 else f"be {names[0]}"
