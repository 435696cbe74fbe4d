"""Structured output: what the text must match, from any of the parameters for it.

`response_format` has the forms of OpenAI, Fireworks, llama.cpp and Hugging Face's client,
`structured_outputs` that of vLLM and oMLX: exactly one constraint. JSON schemas are checked for
their shape; their content is compiled elsewhere.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from gateway.dialects.fields import (
    Parameters,
    non_empty,
    optional_object,
    read_boolean,
    read_strings,
    typed,
)
from gateway.dialects.json_types import Schema, or_null, schema_of
from gateway.dialects.parameters import PARAMETERS
from gateway.dialects.request import Structure, StructureKind
from gateway.dialects.wire import parse_object
from gateway.records.errors import InvalidJsonError, invalid, must, unsupported

MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 4096

_OUTPUTS = "structured_outputs"
_SOURCES: dict[str, Schema] = {
    "json": schema_of("dict | bool | str"),
    "json_object": schema_of("True"),
    "regex": schema_of("str[1:]"),
    "choice": schema_of(f"list[str[1:{MAX_CHOICE_CHARACTERS}], 1:{MAX_CHOICES}]"),
    "grammar": schema_of("str[1:]"),
}
CONSTRAINTS = tuple(_SOURCES)

STRUCTURED_OUTPUTS_SCHEMA = or_null(
    {
        "type": "object",
        "oneOf": [
            {"required": [name], "properties": {name: source}} for name, source in _SOURCES.items()
        ],
    }
)


def read_structured_outputs(value: object) -> Structure | None:
    """Return what the text must match. Raises a BadRequestError."""
    if value is None:
        return None
    value = optional_object(value, _OUTPUTS)
    read_boolean(value.get("json_object"), f"{_OUTPUTS}.json_object")
    given = [name for name in CONSTRAINTS if value.get(name) is not None]
    if "json_object" in given and value["json_object"] is False:
        given.remove("json_object")
    if len(given) != 1:
        raise invalid(
            _OUTPUTS,
            f"must have exactly one of {', '.join(CONSTRAINTS)}. Given: "
            f"{', '.join(given) or 'none'}.",
        )
    return _output_structure(given[0], value[given[0]])


def _output_structure(name: str, source: Any) -> Structure:
    param = f"{_OUTPUTS}.{name}"
    if name == "json_object":
        return Structure(StructureKind.JSON_OBJECT, None, param)
    if name == "json":
        return Structure(StructureKind.JSON_SCHEMA, decoded_schema(source, param), param)
    if name == "choice":
        return Structure(StructureKind.CHOICE, _output_choices(source, param), param)
    source = non_empty(source, param)
    if name == "regex":
        return Structure(StructureKind.REGEX, source, param)
    # vLLM accepts both languages in one field; only GBNF has this operator.
    kind = StructureKind.GBNF if "::=" in source else StructureKind.LARK
    return Structure(kind, source, param)


def _output_choices(source: object, param: str) -> list[str]:
    choices = read_strings(source, param, most=MAX_CHOICES, longest=MAX_CHOICE_CHARACTERS)
    if not choices:
        raise must(param, "have at least one string", [])
    return choices


_FORMAT = "response_format"
_FORMAT_TYPES = ("text", "json_object", "json_schema", "grammar")
_WRAPPER = {"name", "description", "strict"}
"""Members of OpenAI's `json_schema` besides the schema; other objects are schemas themselves."""

RESPONSE_FORMAT_SCHEMA = schema_of(
    """{
        "type": kind,
        "schema?": dict | bool | str | None,
        "value?": dict | bool | str | None,
        "json_schema?": dict | bool | str | None,
        "grammar?": str | None,
    } | None""",
    kind={"enum": list(_FORMAT_TYPES)},
)


def read_response_format(value: object) -> Structure | None:
    """Return what the text must match, or None for plain text. Raises a BadRequestError."""
    if not (value := optional_object(value, _FORMAT)):
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return _json_format(value, needs_schema=False)
        case "json_schema":
            return _json_format(value, needs_schema=True)
        case "grammar":
            source = non_empty(value.get("grammar"), f"{_FORMAT}.grammar")
            return Structure(StructureKind.GBNF, source, _FORMAT, ".grammar")
        case "structural_tag":
            raise unsupported(
                _FORMAT,
                f"of type structural_tag is not supported. {PARAMETERS['structural_tag'].reason}",
            )
        case _:
            raise must(
                f"{_FORMAT}.type", f"be one of {', '.join(_FORMAT_TYPES)}", value.get("type")
            )


def _json_format(value: dict[str, Any], *, needs_schema: bool) -> Structure:
    # Hugging Face's client sends every schema as TGI expects it, in `value`.
    members = ("json_schema", "schema", "value")
    member = next((each for each in members if value.get(each) is not None), members[0])
    schema, place = value.get(member), f"{_FORMAT}.{member}"
    if schema is None and not needs_schema:
        return Structure(StructureKind.JSON_OBJECT, None, _FORMAT)
    if isinstance(schema, str):
        # Fireworks takes it as text, too.
        schema = decoded_schema(schema, place)
    is_strict = False
    if (
        member != "schema"
        and isinstance(schema, dict)
        and ("schema" in schema or schema.keys() <= {*_WRAPPER, "value"})
    ):
        is_strict = schema.get("strict") is True
        within = "schema" if "schema" in schema or "value" not in schema else "value"
        place, schema = f"{place}.{within}", schema.get(within)
    return Structure(
        StructureKind.JSON_SCHEMA,
        decoded_schema(schema, place),
        _FORMAT,
        place.removeprefix(_FORMAT),
        is_strict=is_strict,
    )


SCHEMA_SCHEMA: dict[str, Any] = {
    "type": ["object", "boolean", "string", "null"],
    "pattern": r"^\s*\{",
}


def checked_schema(value: object, name: str) -> Any:
    """Return a decoded JSON schema: an object or a boolean. Raise InvalidParameterError."""
    if not isinstance(value, dict | bool):
        raise must(name, "be a JSON schema: an object or a boolean", value)
    return value


def decoded_schema(value: object, name: str) -> Any:
    """Return a JSON schema, decoded if it is a JSON string. Raise InvalidParameterError."""
    if not isinstance(value, str):
        return checked_schema(value, name)
    try:
        return parse_object(value.encode())
    except InvalidJsonError:
        raise must(name, "be a JSON schema of at most 64 levels", value[:80]) from None


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
    json_schema: {schema}}` (or the schema itself, or its text, there or in `value`), or `{type:
    grammar, grammar}`. Default: text."""
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
