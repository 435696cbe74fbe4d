"""Combine reasoning, tool calls and a structure into one grammar for a response."""

import re
from dataclasses import dataclass

import msgspec

from gateway.completions.structure import lark
from gateway.completions.structure.formats import FORMATS
from gateway.completions.structure.schemas import Schemas
from gateway.completions.structure.tools import calls_alone, calls_in_text
from gateway.completions.structure.translate import to_lark
from gateway.dialects.request import Reasoning, Structure, ToolUse


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a response must match: a structure, tool calls, or either of them."""

    structure: Structure | None
    """None if a call is forced."""
    tool_use: ToolUse | None
    reasoning: Reasoning | None
    """Reasoning that ends before the constraint begins; None if there is none."""
    call_format: str = "hermes"
    """Name of the format of calls, in `formats`."""
    enforces_lenient: bool = True
    """Whether lenient schemas are enforced at all."""

    @property
    def has_lenient(self) -> bool:
        """Whether a schema is enforced that need not be enforced completely."""
        use, structure = self.tool_use, self.structure
        tools = [each for each in use.callable_tools if use.is_exact(each)] if use else []
        return not (structure is None or structure.is_strict) or not all(
            each.is_strict or each.grammar for each in tools
        )

    @property
    def is_compound(self) -> bool:
        """Whether text may precede the constraint, or there is a choice of constraints."""
        if self.tool_use is None:
            return self.reasoning is not None
        return not self.tool_use.is_forced or self.reasoning is not None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def added_tokens(tokenizer_json: bytes) -> lark.TokenIds:
    """Return a tokenizer's added tokens by text. Raise msgspec.DecodeError for an invalid file."""
    file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    return {token.content: token.id for token in file.added_tokens}


def to_grammar(
    constraint: Constraint, token_ids: lark.TokenIds, schemas: Schemas | None = None
) -> str:
    """Return one Lark grammar for llguidance that matches the constraint. Raises RefusedError."""
    schemas = schemas or Schemas(enforces_lenient=constraint.enforces_lenient)
    if constraint.structure is not None and not constraint.is_compound:
        return to_lark(constraint.structure, schemas)
    content = _content(constraint, token_ids, schemas)
    if constraint.reasoning is None:
        return lark.document(content.expression, *content.rules)
    reasoning = _reasoning(constraint.reasoning, token_ids)
    start = f"{reasoning.expression} ({content.expression})"
    return lark.document(start, *content.rules, *reasoning.rules)


def calls_grammar(
    tool_use: ToolUse, token_ids: lark.TokenIds, schemas: Schemas, call_format: str
) -> str:
    """Return the grammar of tool calls without surrounding text. Raises RefusedError."""
    calls = calls_alone(tool_use, token_ids, schemas, FORMATS[call_format])
    return lark.document(calls.expression, *calls.rules)


def _content(constraint: Constraint, token_ids: lark.TokenIds, schemas: Schemas) -> lark.Part:
    structure, tool_use = constraint.structure, constraint.tool_use
    if tool_use is None:
        if structure is None:
            raise ValueError("a constraint needs a structure or tools")
        return lark.nested("answer", to_lark(structure, schemas))
    if structure is None:
        return calls_in_text(tool_use, token_ids, schemas, FORMATS[constraint.call_format])
    structured = lark.nested("answer", to_lark(structure, schemas))
    calls = calls_alone(tool_use, token_ids, schemas, FORMATS[constraint.call_format])
    return lark.Part(
        f"{structured.expression} | {calls.expression}", structured.rules + calls.rules
    )


def _reasoning(reasoning: Reasoning, token_ids: lark.TokenIds) -> lark.Part:
    """Return the grammar of reasoning until its end, from its start mark or from within it.

    Text without a start mark is reasoning too, because the parsers treat it as reasoning.
    """
    begin = "" if reasoning.is_open else f"({lark.mark(reasoning.start, token_ids)})? "
    if reasoning.end not in token_ids:
        # A lazy terminal ends at the first mark.
        return lark.Part(
            f"{begin}thought", (rf"thought[lazy]: /(.|\n)*{_pattern(reasoning.end)}/",)
        )
    marks = "|".join(map(_pattern, (reasoning.start, reasoning.end)))
    return lark.Part(
        f"{begin}thought {lark.mark(reasoning.end, token_ids)}",
        ("thought: THOUGHT", rf"THOUGHT: /(.|\n)*/ & ~/(.|\n)*({marks})(.|\n)*/"),
    )


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
