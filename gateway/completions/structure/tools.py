"""Tool calls: the grammar that makes a model write them, and their parser.

A call is `<tool_call>`, a line of JSON with `name` and `arguments`, and `</tool_call>`, as Hermes
and Qwen models write it. The argument of a tool with a grammar is a text. The model writes it as it
is, without the JSON's end, so that the grammar needs no escapes.
"""

import json
import re
from dataclasses import dataclass
from typing import Final

import msgspec
from tokenizers import Tokenizer

from gateway.completions.structure import lark
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.schemas import Schemas
from gateway.completions.structure.translate import to_lark
from gateway.dialects.request import Tool, ToolMode, ToolUse

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that a model wrote."""

    name: str
    arguments: str
    """JSON as the model wrote it."""


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_find_end = re.compile(
    rf'(?:[^"<]|"(?:[^"\\]|\\.)*+"|<(?!/?tool_call>))*+(?P<end>{CLOSING})', re.DOTALL
).match
"""Finds the end of a call, outside of its strings."""

_MOST_UNCLOSED_CALLS: Final = 8
"""Calls without an end that are skipped: each takes a search through the whole text."""

_read_call = msgspec.json.Decoder(_WrittenCall).decode


def has_tool_calls(tokenizer: Tokenizer) -> bool:
    """Whether the model's vocabulary has the token that begins a call."""
    return tokenizer.token_to_id(OPENING) is not None


def calls_in_text(tool_use: ToolUse, token_ids: lark.TokenIds, schemas: Schemas) -> lark.Part:
    """Return the grammar of a text with calls. Raises RefusedError.

    If a call is required, its arguments match the schema of its tool. If calls are optional, free
    text may surround them, and only the arguments of strict tools must match.
    """
    if tool_use.is_forced:
        return calls_alone(tool_use, token_ids, schemas)
    closing = lark.mark(CLOSING, token_ids)
    count = "*" if tool_use.is_parallel else "?"
    if OPENING in token_ids:
        opening = f"opening: text {lark.mark(OPENING, token_ids)}"
    else:
        # A lazy terminal ends at the first tag, so the text before it contains no tag.
        opening = rf"opening[lazy]: /(.|\n)*{OPENING}/"
    return lark.Part(
        rf"(opening /\n?/ body {closing}){count} text",
        (
            opening,
            "text: TEXT",
            rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{OPENING}(.|\n)*/",
            *_bodies(tool_use, schemas),
        ),
    )


def calls_alone(tool_use: ToolUse, token_ids: lark.TokenIds, schemas: Schemas) -> lark.Part:
    """Return the grammar of one call, or of several if allowed, and nothing else.

    Raises RefusedError.
    """
    opening, closing = lark.mark(OPENING, token_ids), lark.mark(CLOSING, token_ids)
    is_single = tool_use.mode is ToolMode.NAMED or not tool_use.is_parallel
    return lark.Part(
        "call" if is_single else r"call (/\n?/ call)*",
        (*_bodies(tool_use, schemas), rf"call: {opening} /\n?/ body {closing}"),
    )


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in a text in order. Skip incomplete or malformed calls."""
    calls, start, unclosed = list[ToolCall](), 0, 0
    while (opening := text.find(OPENING, start)) >= 0 and unclosed < _MOST_UNCLOSED_CALLS:
        start = opening + len(OPENING)
        closing = _find_end(text, start)
        if closing is None:
            unclosed += 1
        elif (call := _parsed(text[start : closing.start("end")])) is not None:
            calls.append(call)
            start = closing.end()
    return calls


def _bodies(tool_use: ToolUse, schemas: Schemas) -> tuple[str, ...]:
    bodies = [
        _body(tool, f"text{index}", schemas, is_exact=tool_use.is_exact(tool))
        for index, tool in enumerate(tool_use.callable_tools)
    ]
    rules = (rule for body in bodies for rule in body.rules)
    return "body: " + "\n | ".join(body.expression for body in bodies), *rules


def _body(tool: Tool, text_rule: str, schemas: Schemas, *, is_exact: bool) -> lark.Part:
    """Return the grammar of a call up to its closing mark. A free text has no other end.

    `text_rule` is the name of the rule for such a text.
    """
    name = json.dumps(tool.name)
    head = (
        f"{lark.literal('{')} {lark.literal(json.dumps('name') + ':')} / ?/ "
        f"{lark.literal(name + ',')} / ?/ {lark.literal(json.dumps('arguments') + ':')}"
    )
    if tool.grammar is not None:
        try:
            text = lark.nested(text_rule, to_lark(tool.grammar))
        except RefusedError as error:
            raise RefusedError(str(error), param=error.param or tool.grammar.place) from None
        return lark.Part(f"{head} {lark.literal(' ')} {text.expression}", text.rules)
    arguments = schemas.json(
        tool.parameters if is_exact else True,
        tool.place,
        is_strict=tool.is_strict,
        of_arguments=True,
    )
    return lark.Part(rf"{head} / ?/ {arguments} {lark.literal('}')} /\n?/")


def _parsed(written: str) -> ToolCall | None:
    try:
        call = _read_call(written)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return ToolCall(call.name, _unwrapped(bytes(call.arguments)))


def _unwrapped(arguments: bytes) -> str:
    """Return arguments as JSON, even if the model wrote the JSON as a string."""
    if not arguments.startswith(b'"'):
        return arguments.decode()
    return msgspec.json.decode(arguments, type=str)
