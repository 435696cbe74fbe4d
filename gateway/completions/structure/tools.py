"""Tool calls: the grammar that makes a model write them, and the parser of Hermes calls.

A Hermes call is `<tool_call>`, a line of JSON with `name` and `arguments`, and `</tool_call>`, as
Hermes and Qwen models write it. The argument of a tool with a grammar is a text. The model writes
it as it is, without the JSON's end, so that the grammar needs no escapes. In the other formats,
tools have no grammars.
"""

import json
import re
from dataclasses import dataclass
from typing import Final

import msgspec
from tokenizers import Tokenizer

from gateway.completions.structure import lark
from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.formats import HERMES, CallFormat, Elements, texts
from gateway.completions.structure.schemas import Schemas
from gateway.completions.structure.translate import to_lark
from gateway.dialects.request import Structure, Tool, ToolMode, ToolUse

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


def calls_in_text(
    tool_use: ToolUse, token_ids: lark.TokenIds, schemas: Schemas, form: CallFormat = HERMES
) -> lark.Part:
    """Return the grammar of a text with calls. Raises RefusedError.

    If a call is required, its arguments match the schema of its tool. If calls are optional, free
    text may surround them, and only the arguments of strict tools must match.
    """
    if tool_use.is_forced:
        return calls_alone(tool_use, token_ids, schemas, form)
    start = re.escape(form.opening).replace("/", r"\/")
    if form.begins_response:
        calls = calls_alone(tool_use, token_ids, schemas, form)
        free = ("text: TEXT", rf"TEXT: /(.|\n)*/ & ~/{start}(.|\n)*/")
        return lark.Part(f"{calls.expression} | text", (*free, *calls.rules))
    if form.opening in token_ids:
        opening = f"opening: text {lark.mark(form.opening, token_ids)}"
    else:
        # A lazy terminal ends at the first tag, so the text before it contains no tag.
        opening = rf"opening[lazy]: /(.|\n)*{start}/"
    count = "*" if tool_use.is_parallel and not form.end else "?"
    return lark.Part(
        f"(opening opened){count} text",
        (
            opening,
            "text: TEXT",
            rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{start}(.|\n)*/",
            *_opened(tool_use, token_ids, schemas, form),
        ),
    )


def calls_alone(
    tool_use: ToolUse, token_ids: lark.TokenIds, schemas: Schemas, form: CallFormat = HERMES
) -> lark.Part:
    """Return the grammar of one call, or of several if allowed, and nothing else.

    Raises RefusedError.
    """
    is_single = _is_single(tool_use) or bool(form.end)
    return lark.Part(
        "call" if is_single else f"call ({form.separator} call)*",
        (
            f"call: {lark.mark(form.opening, token_ids)} opened",
            *_opened(tool_use, token_ids, schemas, form),
        ),
    )


def _is_single(tool_use: ToolUse) -> bool:
    return tool_use.mode is ToolMode.NAMED or not tool_use.is_parallel


def _opened(
    tool_use: ToolUse, token_ids: lark.TokenIds, schemas: Schemas, form: CallFormat
) -> tuple[str, ...]:
    """Return the rules of what follows an opening: a call, or all of them and their end."""
    bodies = [
        _body(
            tool,
            f"text{index}",
            token_ids,
            schemas,
            form,
            is_exact=tool_use.is_exact(tool),
        )
        for index, tool in enumerate(tool_use.callable_tools)
    ]
    opened = "body"
    if form.end:
        more = "" if _is_single(tool_use) else f"({form.separator} body)*"
        opened = f"body {more} {lark.mark(form.end, token_ids)}"
    return (
        f"opened: {opened}",
        "body: " + "\n | ".join(body.expression for body in bodies),
        *(rule for body in bodies for rule in body.rules),
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


def _body(
    tool: Tool,
    prefix: str,
    token_ids: lark.TokenIds,
    schemas: Schemas,
    form: CallFormat,
    *,
    is_exact: bool,
) -> lark.Part:
    """Return the grammar of a call after its opening. `prefix` begins the names of its rules."""
    if tool.grammar is not None:
        return _body_with_text(tool, tool.grammar, prefix, token_ids)
    schema = schemas.closed(
        tool.parameters if is_exact else True,
        tool.place,
        is_strict=tool.is_strict,
        of_arguments=True,
    )
    if form is HERMES:
        arguments = lark.json_value(schema)
        closing = lark.mark(CLOSING, token_ids)
        return lark.Part(
            rf"{_hermes_head(tool)} / ?/ {arguments} {lark.literal('}')} /\n?/ {closing}"
        )
    begin = form.before + tool.name + form.between
    rules: tuple[str, ...] = ()
    if form.has_elements:
        elements = Elements(schema, prefix)
        arguments = elements.expression()
        rules = elements.rules
        if is_exact:
            schemas.name_unenforced(tool.parameters, elements.unenforced)
    else:
        arguments = lark.json_value(schema)
    parts = texts(begin, token_ids), arguments, texts(form.after, token_ids)
    return lark.Part(" ".join(filter(None, parts)), rules)


def _body_with_text(
    tool: Tool, grammar: Structure, prefix: str, token_ids: lark.TokenIds
) -> lark.Part:
    """Return the grammar of a Hermes call with a free text, which has no end but the mark."""
    try:
        text = lark.nested(prefix, to_lark(grammar))
    except RefusedError as error:
        raise RefusedError(str(error), param=error.param or grammar.place) from None
    closing = lark.mark(CLOSING, token_ids)
    head = f"{_hermes_head(tool)} {lark.literal(' ')}"
    return lark.Part(f"{head} {text.expression} {closing}", text.rules)


def _hermes_head(tool: Tool) -> str:
    """Return the beginning of a Hermes call, with or without white space."""
    name = json.dumps(tool.name)
    return (
        rf"/\n?/ {lark.literal('{')} {lark.literal(json.dumps('name') + ':')} / ?/ "
        f"{lark.literal(name + ',')} / ?/ {lark.literal(json.dumps('arguments') + ':')}"
    )


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
