"""Structured output: what the text must match, from any of the parameters for it."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from gateway.dialects.fields import Parameters, typed
from gateway.dialects.request import Structure, StructureKind
from gateway.dialects.structured.response_format import RESPONSE_FORMAT_SCHEMA, read_response_format
from gateway.dialects.structured.schemas import SCHEMA_SCHEMA, checked_schema, decoded_schema
from gateway.dialects.structured.structured_outputs import (
    STRUCTURED_OUTPUTS_SCHEMA,
    read_structured_outputs,
)
from gateway.records.errors import invalid, must


class GrammarSyntax(StrEnum):
    """Languages of a grammar given as a string."""

    GBNF = "gbnf"
    LARK = "lark"


_TAGGED_KINDS = {
    "regex": StructureKind.REGEX,
    "lark": StructureKind.LARK,
    "json_schema": StructureKind.JSON_SCHEMA,
    "llguidance": StructureKind.LLGUIDANCE,
}


class StructureParameters(Parameters):
    """Constraints on the text; at most one of them per request."""

    grammar: Annotated[
        Any, typed('str | {"type": kind, "value": Any} | None', kind={"enum": list(_TAGGED_KINDS)})
    ] = None
    """A grammar that the text must match: a string in llama.cpp's GBNF or in the language of
    `grammar_syntax`, or an object with `type` (regex, lark, json_schema or llguidance) and
    `value`."""
    grammar_syntax: Annotated[GrammarSyntax, Field(strict=False)] | None = None
    """Language of a `grammar` given as a string. Default: gbnf."""
    json_schema: Annotated[Any, Field(json_schema_extra=SCHEMA_SCHEMA)] = None
    """A JSON schema that the text must match, or its text; {} matches any JSON. Default: none."""
    response_format: Annotated[Any, Field(json_schema_extra=RESPONSE_FORMAT_SCHEMA)] = None
    """`{type: text}`, `{type: json_object}` with an optional `schema`, `{type: json_schema,
    json_schema: {schema}}` (or the schema itself there or in `value`), or `{type: grammar,
    grammar}`. Default: text."""
    structured_outputs: Annotated[Any, Field(json_schema_extra=STRUCTURED_OUTPUTS_SCHEMA)] = None
    """Exactly one of `json` (a JSON schema), `json_object` (true), `regex`, `choice` (a list of
    strings) and `grammar`."""


def read_structure(body: StructureParameters) -> Structure | None:
    """Return what the text must match, or None if it is unconstrained. Raises a BadRequestError."""
    found = [structure for structure in _all_structures(body) if structure is not None]
    if len(found) > 1:
        raise invalid(
            f"{found[0].param}",
            f"and '{found[1].param}' cannot be combined: a text can have only one structure.",
            param=found[1].param,
        )
    return found[0] if found else None


def _all_structures(body: StructureParameters) -> Iterable[Structure | None]:
    yield _grammar(body.grammar, body.grammar_syntax)
    if body.json_schema is not None:
        schema = decoded_schema(body.json_schema, "json_schema")
        yield Structure(StructureKind.JSON_SCHEMA, schema, "json_schema")
    yield read_response_format(body.response_format)
    yield read_structured_outputs(body.structured_outputs)


def _grammar(value: object, syntax: GrammarSyntax | None) -> Structure | None:
    if syntax is not None and value is not None and not isinstance(value, str):
        raise invalid("grammar_syntax", "is only allowed with a 'grammar' that is a string.")
    if value is None or value == "":
        return None
    if isinstance(value, str):
        kind = StructureKind.LARK if syntax is GrammarSyntax.LARK else StructureKind.GBNF
        return Structure(kind, value, "grammar")
    if isinstance(value, dict):
        return _tagged_grammar(value)
    raise must("grammar", "be a string or an object", value)


def _tagged_grammar(value: dict[str, Any]) -> Structure:
    tag, source = value.get("type"), value.get("value")
    kind = _TAGGED_KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise must("grammar.type", f"be one of {', '.join(_TAGGED_KINDS)}", tag)
    if kind is StructureKind.JSON_SCHEMA:
        return Structure(kind, checked_schema(source, "grammar.value"), "grammar", ".value")
    is_right = isinstance(source, str) or (
        kind is StructureKind.LLGUIDANCE and isinstance(source, dict)
    )
    if not is_right or not source:
        expected = "string or object" if kind is StructureKind.LLGUIDANCE else "string"
        raise must("grammar.value", f"be a non-empty {expected}", source)
    return Structure(kind, source, "grammar", ".value")
