"""Calls of tools: the grammar that makes a model write them, and reading them out of its text.

A call is `<tool_call>`, a line of JSON with `name` and `arguments`, and `</tool_call>`, as Hermes and Qwen
models write it.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from gateway.dialects.request import Tool, ToolMode, ToolUse
from gateway.structure import lark
from gateway.structure.errors import RefusedError
from gateway.structure.schemas import json_from_schema

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"

_ANY_OBJECT: Final = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The ids of the tokens around a call, None where the tokenizer spells the tag out."""

    opening_id: int | None
    closing_id: int | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote."""

    name: str
    arguments: str
    """JSON as the model wrote it."""


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


_read_call = msgspec.json.Decoder(_WrittenCall).decode


def has_tool_calls(tokenizer: Tokenizer) -> bool:
    """Whether the model was made with a token that begins a call."""
    return tokenizer.token_to_id(OPENING) is not None


def tool_format(tokenizer_json: bytes) -> ToolFormat:
    """Return how calls are written with a tokenizer. Raise msgspec.DecodeError if it is none."""
    file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    ids = {token.content: token.id for token in file.added_tokens}
    return ToolFormat(ids.get(OPENING), ids.get(CLOSING))


def to_grammar(tool_use: ToolUse, tags: ToolFormat) -> str:
    """Return Lark for text with calls. Raises RefusedError.

    If a call must come, its arguments match the schema of its tool. If calls are up to the model, free text
    may stand around them and only the arguments of strict tools have to match.
    """
    tools = tool_use.tools
    if tool_use.mode is ToolMode.NAMED:
        tools = [tool for tool in tools if tool.name == tool_use.name]
    is_free = tool_use.mode is ToolMode.AUTO
    bodies = "\n | ".join(_body(tool, is_exact=tool.is_strict or not is_free) for tool in tools)
    opening, closing = _tag(tags.opening_id, OPENING), _tag(tags.closing_id, CLOSING)
    rules = [f"body: {bodies}", rf"call: {opening} /\n?/ body /\n?/ {closing}"]
    match tool_use.mode:
        case ToolMode.NAMED:
            return lark.document("call", *rules)
        case ToolMode.REQUIRED:
            return lark.document(r"call (/\n?/ call)*", *rules)
        case ToolMode.AUTO:
            return _with_free_text(rf"/\n?/ body /\n?/ {closing}", rules[0], tags)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in a text, in their order. What is no complete call of that form is left out."""
    segments = text.split(OPENING)[1:]
    return [call for segment in segments if (call := _parsed(segment)) is not None]


def _with_free_text(call: str, body: str, tags: ToolFormat) -> str:
    if tags.opening_id is None:
        # A lazy terminal ends with the first tag, so that no tag can be part of the text before it.
        opening = rf"opening[lazy]: /(.|\n)*{OPENING}/"
    else:
        opening = f"opening: text {_tag(tags.opening_id, OPENING)}"
    return lark.document(
        f"(opening {call})* text",
        opening,
        "text: TEXT",
        rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{OPENING}(.|\n)*/",
        body,
    )


def _tag(token_id: int | None, text: str) -> str:
    return lark.literal(text) if token_id is None else f"<[{token_id}]>"


def _body(tool: Tool, *, is_exact: bool) -> str:
    schema: Any = tool.parameters if is_exact else _ANY_OBJECT
    if isinstance(schema, dict):
        schema = {**_ANY_OBJECT, **schema}
    elif schema is True:
        schema = _ANY_OBJECT
    try:
        arguments = json_from_schema(schema)
    except RefusedError as error:
        raise RefusedError(f"tool '{tool.name}': {error}") from None
    name = json.dumps(tool.name)
    return (
        f"{lark.literal('{')} {lark.literal(json.dumps('name') + ':')} / ?/ {lark.literal(name + ',')} "
        f"/ ?/ {lark.literal(json.dumps('arguments') + ':')} / ?/ {arguments} {lark.literal('}')}"
    )


def _parsed(segment: str) -> ToolCall | None:
    written, closing, _ = segment.rpartition(CLOSING)
    if not closing:
        return None
    try:
        call = _read_call(written)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return ToolCall(call.name, _unwrapped(bytes(call.arguments)))


def _unwrapped(arguments: bytes) -> str:
    """Return arguments as JSON, also if the model put the JSON into a string."""
    if not arguments.startswith(b'"'):
        return arguments.decode()
    return msgspec.json.decode(arguments, type=str)
