"""Input of Responses, converted to the conversation of a chat.

Items are parts of messages: reasoning, text and calls that follow each other are one message of the
assistant. After a compaction or an interruption, calls may lack their outputs, or outputs their
calls; templates accept neither, so both are left out. So are items of types that are unknown, or
that only OpenAI's servers can read.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any, Final, NamedTuple

from contract.messages import TEXT_ARGUMENT
from gateway.dialects.chat.messages import (
    MAX_CALLS,
    MAX_NAME_CHARACTERS,
    MAX_PARTS,
    Conversation,
    add_image,
    check_detail,
    join_reasoning,
    read_arguments,
    read_object,
    read_text,
    required_text,
)
from gateway.dialects.fields import one_of, read_list, required
from gateway.dialects.json_styles import restyled
from gateway.dialects.parameters import Endpoints, unread_file
from gateway.dialects.request import Sealed
from gateway.dialects.responses.tools import Toolbox, flat_name
from gateway.dialects.unknown_members import by_type, name_once
from gateway.records.errors import MissingParameterError, invalid, must, unsupported

MAX_ITEMS: Final = 100_000
ROLES: Final = ("user", "assistant", "system", "developer")

_TEXTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""The member with the text of each type of part that has one."""
_OUTPUTS: Final = (
    *("function_call_output", "custom_tool_call_output"),
    *("local_shell_call_output", "shell_call_output"),
)
_UNCALLED: Final = "input.output_without_call"
_ITEM_MEMBERS: Final = by_type(Endpoints.RESPONSES, "input[]")
_PART_MEMBERS: Final = by_type(Endpoints.RESPONSES, "content[]")
_SYSTEM: Final = ("system", "developer")
PREVIOUS: Final = "previous_response_id"
REFERENCE: Final = "item_reference"
"""The type of an item that stands for an item of a kept response."""
_ITEM_ID: Final = re.compile("[a-z]+_([a-z2-7]{26})_(in)?-?[0-9]{1,6}")

_Part = dict[str, str]


class Continued(NamedTuple):
    """The response that a request continues, in place of its id in the body."""

    response_id: str
    items: int
    """The items of it, and before it, with which the input begins."""


def as_items(value: Any) -> Any:
    """Return an input as items; one that is no text is unchanged."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def item_id(prefix: str, response_id: str, place: str) -> str:
    """Return the id of an item, which names its response. Places of the input begin with `in`."""
    return f"{prefix}{response_id.rpartition('_')[2]}_{place}"


def place_of(item: str) -> tuple[str, bool] | None:
    """Return the id of an item's response, without prefix, and whether the item is of its input.

    Return None for an id that no response has given.
    """
    found = _ITEM_ID.fullmatch(item)
    return None if found is None else (found[1], found[2] is not None)


def listed_items(items: list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Return the items of a valid input with all members that lists of items show.

    Each has an id of its own. The conversation that `read_input` returns for them is the same.
    """
    listed, ids = list[dict[str, Any]](), set[str]()
    for index, item in enumerate(items):
        id_ = item.get("id")
        if not isinstance(id_, str) or not id_ or id_ in ids:
            id_ = item_id("msg_", response_id, f"in{index}")
        ids.add(id_)
        whole = {**item, "id": id_, "type": item.get("type") or "message"}
        if whole["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            whole["content"] = [{"type": kind, "text": item["content"]}]
        listed.append(whole)
    return listed


def read_input(
    value: object, instructions: str | None, toolbox: Toolbox, *, earlier: int = 0
) -> Conversation:
    """Return the conversation, and add the tools in it to the toolbox.

    The first `earlier` items are those of the response that the request continues. Raises a
    BadRequestError that names the first invalid place.
    """
    reader = _Reader(toolbox)
    if instructions:
        reader.add("system", [_text_part(instructions)])
    if value is None:
        raise MissingParameterError("input")
    if isinstance(value, str):
        reader.add("user", [_text_part(value)])
    else:
        items = read_list(value, "input", most=MAX_ITEMS)
        for index, item in enumerate(items, start=-earlier):
            place = f"input[{index}]" if index >= 0 else f"{PREVIOUS}[{index + earlier}]"
            reader.read(item, place)
    conversation = reader.finished()
    if not conversation.messages:
        rule = "must have at least one item that is a message. Given: none."
        if _UNCALLED in conversation.ignored:
            rule = (
                "must have the calls of its outputs, too. Given: outputs alone. Send the whole "
                "conversation, or name the response that has the calls in 'previous_response_id'."
            )
        raise invalid("input", rule)
    return conversation


class _Reader:
    """Reads items in their order."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._conversation = Conversation()
        self._messages = self._conversation.messages
        self._uncalled = set[str]()
        """Ids of calls that still lack an output."""
        self._readers: Mapping[str, Callable[[dict[str, Any], str], None]] = {
            "message": self._read_message,
            "agent_message": self._read_agent_message,
            "reasoning": self._read_reasoning,
            "function_call": self._read_function_call,
            "custom_tool_call": self._read_text_call,
            "tool_search_call": self._read_search,
            "local_shell_call": self._read_shell_call,
            "shell_call": self._read_shell_call,
            "tool_search_output": self._read_found_tools,
            "additional_tools": self._read_more_tools,
            **dict.fromkeys(_OUTPUTS, self._read_output),
        }

    def finished(self) -> Conversation:
        """Return the conversation without calls that lack outputs.

        The messages of developers that follow the instructions join them: few templates take more
        than one message of the system.
        """
        kept = []
        first = [*takewhile(lambda each: each["role"] in _SYSTEM, self._messages)]
        for message in first[1:]:
            first[0]["content"] += message["content"]
        del self._messages[1 : len(first)]
        for message in self._messages:
            join_reasoning(message)
            calls = message.get("tool_calls")
            if calls and not self._uncalled.isdisjoint(call["id"] for call in calls):
                self._ignore("calls_without_output")
                calls = [call for call in calls if call["id"] not in self._uncalled]
                message["tool_calls"] = calls
            if calls == []:
                del message["tool_calls"]
            match message["content"]:
                case []:
                    message["content"] = None if calls else ""
                case [{"type": "text", "text": text}]:
                    message["content"] = text
                case _:
                    pass
            if message.keys() > {"role", "content"} or message["content"] or calls is None:
                kept.append(message)
        self._messages[:] = kept
        return self._conversation

    def add(self, role: str, parts: list[_Part]) -> None:
        """Add a message."""
        self._messages.append({"role": role, "content": parts})

    def read(self, value: object, path: str) -> None:
        """Read an item."""
        item = read_object(value, path)
        has_role = "role" in item and item.get("type") is None
        kind = "message" if has_role else required(item, "type", path)
        if kind == REFERENCE:
            raise unsupported(
                path,
                "refers to an item of an earlier response, and responses are not kept. Send the "
                "item itself.",
            )
        read = self._readers.get(kind) if isinstance(kind, str) else None
        if read is None:
            self._ignore(str(kind))
        else:
            _ITEM_MEMBERS[kind].check(item, path, self._conversation.ignored)
            read(item, path)

    def _read_message(self, item: dict[str, Any], path: str) -> None:
        role = one_of(required(item, "role", path), f"{path}.role", ROLES)
        content = required(item, "content", path)
        parts = self._parts(content, f"{path}.content", takes_images=role == "user")
        if role != "assistant":
            self.add(role, parts)
            return
        message = self._assistant()
        if message["content"] and "tool_calls" not in message:
            self.add("assistant", parts)
        else:
            # No template has text after calls.
            message["content"] += parts

    def _read_agent_message(self, item: dict[str, Any], path: str) -> None:
        parts = self._parts(item.get("content") or [], f"{path}.content")
        author = read_text(item, "author", path)
        if parts:
            self.add("user", [*[_text_part(f"Message from {author}:")] * bool(author), *parts])

    def _read_reasoning(self, item: dict[str, Any], path: str) -> None:
        sealed = read_text(item, "encrypted_content", path)
        for member in ("content", "summary"):
            parts = self._parts(item.get(member) or [], f"{path}.{member}")
            text = "\n".join(part["text"] for part in parts)
            # The summary of another server is not the reasoning.
            if text or sealed:
                break
        if not (text or sealed):
            return
        message = self._assistant()
        if message["content"] or "tool_calls" in message:
            self.add("assistant", [])
            message = self._messages[-1]
        part = text or Sealed(sealed or "", f"{path}.encrypted_content")
        message.setdefault("reasoning", []).append(part)

    def _read_function_call(self, item: dict[str, Any], path: str) -> None:
        name = _required(item, "name", path)
        namespace = read_text(item, "namespace", path) or ""
        arguments = read_arguments(item.get("arguments"), f"{path}.arguments")
        self._add_call(item, path, flat_name(name, namespace), arguments)

    def _read_text_call(self, item: dict[str, Any], path: str) -> None:
        name = flat_name(_required(item, "name", path), read_text(item, "namespace", path) or "")
        text = read_text(item, "input", path) or ""
        given = restyled({TEXT_ARGUMENT: text}, _call_id(item, path))
        self._add_call(item, path, name, given)

    def _read_search(self, item: dict[str, Any], path: str) -> None:
        arguments = read_arguments(item.get("arguments"), f"{path}.arguments")
        self._add_call(item, path, "tool_search", arguments)

    def _read_shell_call(self, item: dict[str, Any], path: str) -> None:
        action = read_object(item.get("action") or {}, f"{path}.action")
        name = item["type"].removesuffix("_call")
        given = {key: each for key, each in action.items() if key != "type" and each is not None}
        self._add_call(item, path, name, given)

    def _add_call(
        self, item: dict[str, Any], path: str, name: str, arguments: dict[str, Any] | str
    ) -> None:
        call_id = _call_id(item, path)
        message = self._assistant()
        calls = message.setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            self.add("assistant", [])
            calls = self._messages[-1].setdefault("tool_calls", [])
        # In vLLM's order, as in chats.
        function = {"arguments": arguments, "name": name}
        calls.append({"id": call_id, "function": function, "type": "function"})
        self._uncalled.add(call_id)

    def _read_output(self, item: dict[str, Any], path: str) -> None:
        if self._is_uncalled(item, path):
            return
        output, place = item.get("output"), f"{path}.output"
        parts: list[_Part] = []
        self._conversation.is_in_result = True
        match output:
            case None:
                pass
            case str():
                parts = [_text_part(output)]
            case [{"type": _}, *_]:
                parts = self._parts(output, place, takes_images=True)
            case _:
                parts = [_text_part(json.dumps(output, ensure_ascii=False))]
        self._conversation.is_in_result = False
        self._add_output(item, path, parts)

    def _read_found_tools(self, item: dict[str, Any], path: str) -> None:
        described = self._toolbox.add(item.get("tools"), f"{path}.tools")
        if not self._is_uncalled(item, path):
            self._add_output(item, path, [_text_part(_listed(described))])

    def _read_more_tools(self, item: dict[str, Any], path: str) -> None:
        described = self._toolbox.add(item.get("tools"), f"{path}.tools")
        self.add(
            "developer", [_text_part(f"These tools are available, too:\n{_listed(described)}")]
        )

    def _is_uncalled(self, item: dict[str, Any], path: str) -> bool:
        """Return whether no call waits for an output, which is then left out."""
        if _call_id(item, path) in self._uncalled:
            return False
        name_once(_UNCALLED, self._conversation.ignored)
        return True

    def _add_output(self, item: dict[str, Any], path: str, parts: list[_Part]) -> None:
        call_id = _call_id(item, path)
        self._uncalled.discard(call_id)
        texts = [part["text"] for part in parts if part["type"] == "text"]
        result = {"role": "tool", "content": "\n".join(texts), "tool_call_id": call_id}
        self._messages.append(result)
        if images := [part for part in parts if part["type"] == "image"]:
            # Templates accept images in user messages only.
            self.add("user", images)

    def _assistant(self) -> dict[str, Any]:
        """Return the message of the assistant that an item continues; a new one after others."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.add("assistant", [])
        return self._messages[-1]

    def _parts(self, content: object, path: str, *, takes_images: bool = False) -> list[_Part]:
        if isinstance(content, str):
            return [_text_part(content)]
        if not isinstance(content, list):
            raise must(path, "be a string or an array of parts", content)
        parts: list[_Part] = []
        for index, each in enumerate(read_list(content, path, most=MAX_PARTS)):
            parts += self._part(each, f"{path}[{index}]", takes_images=takes_images)
        return parts

    def _part(self, value: object, path: str, *, takes_images: bool) -> Iterable[_Part]:
        part = read_object(value, path)
        kind = required(part, "type", path)
        members = _PART_MEMBERS.get(kind) if isinstance(kind, str) else None
        if members is not None:
            members.check(part, path, self._conversation.ignored)
        if members is not None and kind in _TEXTS:
            return [_text_part(required_text(part, _TEXTS[kind], path))]
        if kind == "input_image" and takes_images:
            check_detail(part, path)
            add_image(part.get("image_url"), f"{path}.image_url", self._conversation)
            return [{"type": "image"}]
        if kind == "input_file" and (part.get("file_data") or part.get("file_url")):
            self._ignore(kind)
            names = ("filename", "file_data", "file_url")
            name, data, url = (read_text(part, each, path) for each in names)
            return [_text_part(unread_file(None, data=data or "", name=name or url))]
        if kind in ("input_file", "input_image", "input_audio"):
            raise unsupported(
                f"{path}.type",
                f"{kind} is not supported here. Send the content as text, or images in messages "
                "of role user.",
            )
        self._ignore(str(kind))
        return []

    def _ignore(self, kind: str) -> None:
        name_once(f"input.{kind}", self._conversation.ignored)


def _text_part(text: str) -> _Part:
    return {"type": "text", "text": text}


def _listed(tools: list[dict[str, Any]]) -> str:
    """Return tools as chat templates list them."""
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def _required(item: dict[str, Any], name: str, path: str) -> str:
    return required_text(item, name, path, most=MAX_NAME_CHARACTERS)


def _call_id(item: dict[str, Any], path: str) -> str:
    # Older items of shells have only their own id.
    name = "id" if item.get("call_id") is None and "shell" in item["type"] else "call_id"
    return _required(item, name, path)
