"""Try out a model's chat template in the sandbox."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from gateway.structure.errors import RefusedError
from gateway.templates.template import (
    ChatTemplate,
    RefusedMessagesError,
    TooLongError,
    WrongTemplateError,
)

_MAX_CHARACTERS: Final = 1_000_000
_TURNS: Final = 64
_WORDS: Final = "a few words " * 20
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
_CALL: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": "y"}},
}


def try_out(source: str) -> None:
    """Compile a template and render sample conversations. Raise RefusedError if it is invalid.

    Whether the template accepts a conversation does not matter: templates reject what their models
    do not support.
    """
    try:
        template = ChatTemplate(source)
    except WrongTemplateError as error:
        raise RefusedError(str(error)) from None
    for variables in _conversations():
        try:
            template.render(variables, now=datetime.now(UTC), most_characters=_MAX_CHARACTERS)
        except TooLongError:
            raise RefusedError("its text for a short conversation is too long") from None
        except RefusedMessagesError:
            continue


def _conversations() -> list[Mapping[str, Any]]:
    turn = [{"role": "user", "content": _WORDS}, {"role": "assistant", "content": _WORDS}]
    called: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "call_1", "name": "f"},
    ]
    parts: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}
    ]
    asked: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
        ([{"role": "system", "content": "a"}, *turn * _TURNS, turn[0]], None),
        (called, [_TOOL]),
        (parts, None),
    ]
    return [
        {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        for messages, tools in asked
    ]
