"""`response_format` in the forms of OpenAI, Fireworks, llama.cpp and Hugging Face's client."""

from typing import Any

from gateway.dialects.json_types import schema_of
from gateway.dialects.parameters import PARAMETERS
from gateway.dialects.request import Structure, StructureKind
from gateway.dialects.structured.schemas import checked_schema
from gateway.records.errors import must, unsupported

_NAME = "response_format"
_TYPES = ("text", "json_object", "json_schema", "grammar")
_WRAPPER = {"name", "description", "strict"}
"""Members of OpenAI's `json_schema` besides the schema; other objects are schemas themselves."""

RESPONSE_FORMAT_SCHEMA = schema_of(
    """{
        "type": kind,
        "schema?": dict | bool | None,
        "value?": dict | bool | None,
        "json_schema?": dict | bool | None,
        "grammar?": str | None,
    } | None""",
    kind={"enum": list(_TYPES)},
)


def read_response_format(value: object) -> Structure | None:
    """Return what the text must match, or None for plain text. Raises a BadRequestError."""
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise must(_NAME, "be an object", value)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return _json(value, needs_schema=False)
        case "json_schema":
            return _json(value, needs_schema=True)
        case "grammar":
            return _grammar(value)
        case "structural_tag":
            raise unsupported(
                _NAME,
                f"of type structural_tag is not supported. {PARAMETERS['structural_tag'].reason}",
            )
        case _:
            raise must(f"{_NAME}.type", f"be one of {', '.join(_TYPES)}", value.get("type"))


def _json(value: dict[str, Any], *, needs_schema: bool) -> Structure:
    # Hugging Face's client sends every schema as TGI expects it, in `value`.
    members = ("json_schema", "schema", "value")
    member = next((each for each in members if value.get(each) is not None), members[0])
    schema = value.get(member)
    if schema is None and not needs_schema:
        return Structure(StructureKind.JSON_OBJECT, None, _NAME)
    place = f"{_NAME}.{member}"
    if (
        member != "schema"
        and isinstance(schema, dict)
        and ("schema" in schema or schema.keys() <= {*_WRAPPER, "value"})
    ):
        within = "schema" if "schema" in schema or "value" not in schema else "value"
        place, schema = f"{place}.{within}", schema.get(within)
    return Structure(StructureKind.JSON_SCHEMA, checked_schema(schema, place), _NAME, f".{member}")


def _grammar(value: dict[str, Any]) -> Structure:
    source = value.get("grammar")
    if not isinstance(source, str) or not source:
        raise must(f"{_NAME}.grammar", "be a non-empty string", source)
    return Structure(StructureKind.GBNF, source, _NAME, ".grammar")
