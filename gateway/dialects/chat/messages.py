"""Chat messages: validate them and convert them to the form that chat templates take.

The form is vLLM's. Call arguments are objects instead of JSON strings, unless the model did not
write an object: `max_tokens` may cut it off. Reasoning is present under both of its names, a tool
result is one text, and `function_call` becomes a tool call. Two steps depend on the model and come
later: content stays a text or a list of parts, and `developer` stays a role.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import Field

from common.not_none import not_none
from contract.messages import TEXT_ARGUMENT
from gateway.dialects.fields import Parameters, agreed, one_of, read_boolean, read_list, required
from gateway.dialects.images import MAX_IMAGES, decoded_image
from gateway.dialects.json_types import schema_of
from gateway.dialects.parameters import Endpoints, unread_file
from gateway.dialects.request import ImageSource, Sealed
from gateway.dialects.unknown_members import by_type, name_once
from gateway.dialects.wire import parse_object, written_object
from gateway.records.errors import (
    InvalidJsonError,
    MissingParameterError,
    invalid,
    must,
    shown,
    unsupported,
)

MAX_MESSAGES = 100_000
"""As in Anthropic's API. A chat that cannot fit into the context window is rejected earlier."""
MAX_PARTS = 1024
"""Maximum parts per message."""
MAX_CALLS = 128
"""Maximum tool calls per message."""
MAX_NAME_CHARACTERS = 256
"""Maximum length of names and of call ids."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
DETAILS = ("auto", "low", "high", "original")

_MESSAGE_MEMBERS: Final = by_type(Endpoints.CHATS, "messages[]")
"""By role; other roles have those of users."""
_PART_MEMBERS: Final = by_type(Endpoints.CHATS, "content[]")

_DATA_SCHEME = "data:"

_NAME: Final = schema_of(f"str[1:{MAX_NAME_CHARACTERS}]")
_PART: Final = schema_of(
    """{
        "type": "text" | "image_url" | "refusal" | "file",
        "text?": str,
        "refusal?": str,
        "file?": {"file_data": str, "filename?": str | None},
        "image_url?": str | {"url": str, "detail?": detail},
    }""",
    detail={"enum": [*DETAILS, None]},
)
_CALL: Final = schema_of(
    """{
        "id": name,
        "type?": "function",
        "function": {"name": name, "arguments?": str | dict | None},
    } | {"id": name, "type": "custom", "custom": {"name": name, "input?": str | None}}""",
    name=_NAME,
)
_MESSAGE: Final = schema_of(
    """{
        "role": role,
        "content?": str | parts | None,
        "name?": name | None,
        "tool_call_id?": name | None,
        "tool_calls?": calls | None,
        "reasoning_content?": str | None,
        "reasoning?": str | None,
        "refusal?": str | None,
        "partial?": bool | None,
    }""",
    role=_NAME | {"examples": list(ROLES)},
    name=_NAME,
    parts=schema_of(f"list[part, 1:{MAX_PARTS}]", part=_PART),
    calls=schema_of(f"list[call, :{MAX_CALLS}]", call=_CALL),
)
MESSAGES_SCHEMA: Final = schema_of(f"list[message, 1:{MAX_MESSAGES}]", message=_MESSAGE)


class MessageParameters(Parameters):
    """The conversation."""

    messages: Any = Field(
        default=None,
        description="The conversation, oldest message first. Required. Roles: system, developer, "
        "user, assistant, tool and function; in dialect vllm, any. Content is text or a list of "
        "parts of `type` text or, in user messages, file, of which the model sees only the name, "
        "type and size, and image_url: a data URI, or a URL if the "
        f"gateway's operator allows its host; at most {MAX_IMAGES} images. `reasoning_content` of "
        "assistant messages is passed to chat templates that use it. If the last message is an "
        "assistant message with `partial`, the response continues it.",
        json_schema_extra=MESSAGES_SCHEMA,
    )


@dataclass(slots=True)
class Conversation:
    """Messages in the form for templates, and data collected from them."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """`role`; `content`: a text, None, or a list of {type: text, text} and {type: image}; then
    `tool_calls`, `reasoning` and `reasoning_content`, `tool_call_id` and `name` if present."""
    image_sources: list[ImageSource] = field(default_factory=list)
    """Images of all messages in order, one for each part of type image."""
    has_partial: bool = False
    """Whether the last message is marked as one that the response continues."""
    ignored: list[str] = field(default_factory=list)
    """The first paths of entries that have no effect."""
    is_in_result: bool = False
    """Whether the result of a tool is being read."""
    last_function_call: str = ""
    """The generated id of the last `function_call`, which its result uses."""

    @property
    def ends_with_text_of_assistant(self) -> bool:
        """Whether the last message is the assistant's and has content but no tool calls."""
        last = self.messages[-1]
        is_text = last["content"] is not None and "tool_calls" not in last
        return last["role"] == "assistant" and is_text


def join_reasoning(message: dict[str, Any]) -> None:
    """Join the texts in `reasoning` of a message, unless some of them are to be opened first."""
    parts = message.pop("reasoning", None)
    if parts is None:
        return
    if any(isinstance(each, Sealed) for each in parts):
        message["sealed"] = parts
    else:
        message |= dict.fromkeys(("reasoning", "reasoning_content"), "\n".join(parts))


def read_messages(value: object, *, takes_any_role: bool = False) -> Conversation:
    """Return the conversation. Raises a BadRequestError that names the first invalid place.

    If it `takes_any_role`, a message of an unknown role has text only.
    """
    if value is None:
        raise MissingParameterError("messages")
    messages = read_list(value, "messages", most=MAX_MESSAGES)
    if not messages:
        raise must("messages", "have at least one message", [])
    conversation = Conversation()
    for index, message in enumerate(messages):
        _read_message(message, f"messages[{index}]", conversation, takes_any_role=takes_any_role)
        if conversation.has_partial and index < len(messages) - 1:
            raise invalid(
                f"messages[{index}].partial", "is only allowed in the last message. Given: true."
            )
    return conversation


def check_continued(conversation: Conversation, *, may_repeat: bool) -> None:
    """Raise InvalidParameterError if a response cannot continue the last message.

    Unless it `may_repeat`, the message before must not be an assistant message too.
    """
    last, path = conversation.messages[-1], f"messages[{len(conversation.messages) - 1}]"
    if last["role"] != "assistant":
        raise must(
            f"{path}.role", "be assistant if the response continues the message", last["role"]
        )
    if last["content"] is None or "tool_calls" in last:
        raise invalid(
            path, "must have content and no tool calls if the response continues the message."
        )
    if not may_repeat and [each["role"] for each in conversation.messages[-2:-1]] == ["assistant"]:
        raise invalid(
            path,
            "must not follow another assistant message if the response continues it. Merge the "
            "two messages, or set 'continue_final_message' to false.",
        )


def _read_message(
    value: object, path: str, conversation: Conversation, *, takes_any_role: bool
) -> None:
    message = read_object(value, path)
    role = required(message, "role", path)
    if takes_any_role:
        role = read_text(message, "role", path, most=MAX_NAME_CHARACTERS)
    elif not isinstance(role, str) or role not in ROLES:
        raise must(f"{path}.role", f"be one of {', '.join(ROLES)}", role)
    _MESSAGE_MEMBERS.get(role, _MESSAGE_MEMBERS["user"]).check(message, path, conversation.ignored)
    match role:
        case "assistant":
            read = _read_assistant(message, path, conversation)
        case "tool":
            read = _read_tool_result(message, path, conversation)
        case "function":
            read = _read_function_result(message, path, conversation)
        case _:
            content = _required_content(message, path, conversation, takes_images=role == "user")
            read = {"role": role, "content": content}
    if (name := read_text(message, "name", path, most=MAX_NAME_CHARACTERS)) is not None:
        read["name"] = name
    conversation.messages.append(read)


def _read_assistant(
    message: dict[str, Any], path: str, conversation: Conversation
) -> dict[str, Any]:
    content = _content(message, path, conversation, takes_refusals=True)
    refusal = read_text(message, "refusal", path)
    read: dict[str, Any] = {"role": "assistant", "content": refusal if content is None else content}
    calls = _calls(message, path, conversation)
    if calls:
        read["tool_calls"] = calls
    reasoning = _reasoning(message, path)
    if reasoning is not None:
        read |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if read["content"] is None and not calls and reasoning is None:
        raise MissingParameterError(f"{path}.content")
    conversation.has_partial = bool(read_boolean(message.get("partial"), f"{path}.partial"))
    return read


def _read_tool_result(
    message: dict[str, Any], path: str, conversation: Conversation
) -> dict[str, Any]:
    content = _joined(_required_content(message, path, conversation))
    call = required_text(message, "tool_call_id", path, most=MAX_NAME_CHARACTERS)
    return {"role": "tool", "content": content, "tool_call_id": call}


def _read_function_result(
    message: dict[str, Any], path: str, conversation: Conversation
) -> dict[str, Any]:
    required(message, "name", path)
    content = _content(message, path, conversation)
    read = {"role": "tool", "content": "" if content is None else _joined(content)}
    if conversation.last_function_call:
        read["tool_call_id"] = conversation.last_function_call
    return read


def _required_content(
    message: dict[str, Any], path: str, conversation: Conversation, *, takes_images: bool = False
) -> str | list[dict[str, str]]:
    content = _content(message, path, conversation, takes_images=takes_images)
    if content is None:
        raise MissingParameterError(f"{path}.content")
    return content


def _content(
    message: dict[str, Any],
    path: str,
    conversation: Conversation,
    *,
    takes_images: bool = False,
    takes_refusals: bool = False,
) -> str | list[dict[str, str]] | None:
    content, path = message.get("content"), f"{path}.content"
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise must(path, "be a string or an array of parts", content)
    if not 0 < len(content) <= MAX_PARTS:
        raise must(path, f"have 1 to {MAX_PARTS} parts", len(content))
    kinds = ["text", *["image_url", "file"] * takes_images, *["refusal"] * takes_refusals]
    return [
        _part(part, f"{path}[{index}]", kinds, conversation) for index, part in enumerate(content)
    ]


def _part(value: object, path: str, kinds: list[str], conversation: Conversation) -> dict[str, str]:
    part = read_object(value, path)
    kind = required(part, "type", path)
    if not isinstance(kind, str) or kind not in kinds:
        raise unsupported(
            f"{path}.type",
            f"must be one of {', '.join(kinds)} in a message of this role. Given: {shown(kind)}.",
        )
    _PART_MEMBERS[kind].check(part, path, conversation.ignored)
    if kind == "image_url":
        path, url = f"{path}.{kind}", part.get(kind)
        if isinstance(url, dict):
            check_detail(url, path)
            path, url = f"{path}.url", url.get("url")
        add_image(url, path, conversation)
        return {"type": "image"}
    if kind == "file":
        name_once("messages.file", conversation.ignored)
        path, value = f"{path}.{kind}", read_object(part.get(kind), f"{path}.{kind}")
        data, name = required_text(value, "file_data", path), read_text(value, "filename", path)
        return {"type": "text", "text": unread_file(None, data=data, name=name)}
    return {"type": "text", "text": required_text(part, kind, path)}


def check_detail(value: dict[str, Any], path: str) -> None:
    """Raise InvalidParameterError if an image at `path` has an unknown `detail`."""
    one_of(value.get("detail"), f"{path}.detail", DETAILS)


def add_image(url: object, path: str, conversation: Conversation) -> None:
    """Add the image of a URL or data URI at `path`. Raises a BadRequestError."""
    if len(conversation.image_sources) == MAX_IMAGES:
        raise invalid(
            "messages",
            f"must have at most {MAX_IMAGES} images. Given: one more in '{path}'.",
            param=path,
        )
    if url is None:
        raise MissingParameterError(path)
    if not isinstance(url, str):
        raise must(path, "be a string", url)
    source = ImageSource(url=url, param=path, is_of_tool=conversation.is_in_result)
    if url[: len(_DATA_SCHEME)].lower() == _DATA_SCHEME:
        source = replace(source, file=decoded_image(url, path, param=path), url="")
    conversation.image_sources.append(source)


def _joined(content: str | list[dict[str, str]]) -> str:
    """Return the text of a tool result; few templates accept parts in it."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _reasoning(message: dict[str, Any], path: str) -> str | None:
    names = ("reasoning_content", "reasoning")
    return agreed(**{f"{path}.{name}": read_text(message, name, path) for name in names})


def _calls(message: dict[str, Any], path: str, conversation: Conversation) -> list[dict[str, Any]]:
    legacy = message.get("function_call")
    if legacy is None:
        calls = read_list(message.get("tool_calls"), f"{path}.tool_calls", most=MAX_CALLS)
        return [_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if message.get("tool_calls"):
        raise invalid(f"{path}.function_call", "cannot be combined with 'tool_calls'.")
    # Nine letters and digits: some templates accept no other ids.
    conversation.last_function_call = f"call{len(conversation.messages):05d}"
    function = _function(legacy, f"{path}.function_call")
    return [{"id": conversation.last_function_call, "function": function, "type": "function"}]


def _call(value: object, path: str) -> dict[str, Any]:
    call = read_object(value, path)
    kind = call.get("type", "function")
    if kind not in ("function", "custom"):
        rule = f"must be one of function, custom. Given: {shown(kind)}."
        raise unsupported(f"{path}.type", rule)
    call_id = required_text(call, "id", path, most=MAX_NAME_CHARACTERS)
    value = required(call, kind, path)
    read = _function if kind == "function" else _text_call
    function = read(value, f"{path}.{kind}")
    # In vLLM's order, which affects the prompt if a template dumps the whole call.
    return {"id": call_id, "function": function, "type": "function"}


def _function(value: object, path: str) -> dict[str, Any]:
    function = read_object(value, path)
    name = required_text(function, "name", path, most=MAX_NAME_CHARACTERS)
    arguments = read_arguments(function.get("arguments"), f"{path}.arguments")
    return {"arguments": arguments, "name": name}


def _text_call(value: object, path: str) -> dict[str, Any]:
    call = read_object(value, path)
    name = required_text(call, "name", path, most=MAX_NAME_CHARACTERS)
    return {"arguments": {TEXT_ARGUMENT: read_text(call, "input", path) or ""}, "name": name}


def read_arguments(value: object, path: str) -> dict[str, Any] | str:
    """Return a call's arguments; as text if the model did not write a JSON object."""
    if isinstance(value, dict):
        return value
    if value is not None and not isinstance(value, str):
        raise must(path, "be a string or an object", value)
    if not value or value.isspace():
        return {}
    try:
        return written_object(parse_object(value.encode()), value)
    except InvalidJsonError:
        return value


def read_object(value: object, path: str) -> dict[str, Any]:
    """Return a JSON object. Raises InvalidParameterError."""
    if not isinstance(value, dict):
        raise must(path, "be an object", value)
    return value


def read_text(
    value: dict[str, Any], name: str, path: str, *, most: int | None = None
) -> str | None:
    """Return a string from `value`, or None if absent.

    With `most`, the string must have 1 to `most` characters.
    """
    text = value.get(name)
    if text is None:
        return None
    if not isinstance(text, str):
        raise must(f"{path}.{name}", "be a string", text)
    if most is not None and not 0 < len(text) <= most:
        raise invalid(
            f"{path}.{name}", f"must have 1 to {most} characters. Given: {len(text)} characters."
        )
    return text


def required_text(value: dict[str, Any], name: str, path: str, *, most: int | None = None) -> str:
    """Return a string from `value` as `read_text` does. Raises MissingParameterError if absent."""
    required(value, name, path)
    return not_none(read_text(value, name, path, most=most))
