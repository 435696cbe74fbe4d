"""`response_format` in the forms of OpenAI, Fireworks, llama.cpp and Hugging Face's client."""

from typing import Any

from gateway.dialects.refused import REFUSALS
from gateway.dialects.request import Structure, StructureKind
from gateway.dialects.structured.schemas import checked_schema
from gateway.errors import InvalidParameterError, UnsupportedParameterError, shown

_NAME = "response_format"
_TYPES = ("text", "json_object", "json_schema", "grammar")

RESPONSE_FORMAT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": list(_TYPES)},
                "schema": {"type": ["object", "boolean", "null"]},
                "value": {"type": ["object", "boolean", "null"]},
                "json_schema": {"type": ["object", "null"]},
                "grammar": {"type": ["string", "null"]},
            },
        },
        {"type": "null"},
    ]
}


def read_response_format(value: object) -> Structure | None:
    """Return what the text must match, or None for plain text. Raises a BadRequestError."""
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise InvalidParameterError(
            f"'{_NAME}' must be an object. Given: {shown(value)}.", param=_NAME
        )
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return _json_object(value)
        case "json_schema":
            return _json_schema(value)
        case "grammar":
            return _grammar(value)
        case "structural_tag":
            raise UnsupportedParameterError(
                f"'{_NAME}' of type structural_tag is not supported. "
                f"{REFUSALS['structural_tag'].reason}",
                param=_NAME,
            )
        case _:
            raise InvalidParameterError(
                f"'{_NAME}.type' must be one of {', '.join(_TYPES)}. "
                f"Given: {shown(value.get('type'))}.",
                param=f"{_NAME}.type",
            )


def _json_object(value: dict[str, Any]) -> Structure:
    # Hugging Face's client sends every schema as TGI expects it, in `value`.
    member = "value" if value.get("schema") is None else "schema"
    if value.get(member) is None:
        return Structure(StructureKind.JSON_OBJECT, None, _NAME)
    return _bare_schema(value, member)


def _bare_schema(value: dict[str, Any], member: str = "schema") -> Structure:
    schema = checked_schema(value.get(member), f"{_NAME}.{member}")
    return Structure(StructureKind.JSON_SCHEMA, schema, _NAME, f".{member}")


def _json_schema(value: dict[str, Any]) -> Structure:
    wrapper = value.get("json_schema")
    if wrapper is None and value.get("schema") is not None:
        return _bare_schema(value)
    if not isinstance(wrapper, dict):
        raise InvalidParameterError(
            f"'{_NAME}.json_schema' must be an object with 'schema'. Given: {shown(wrapper)}.",
            param=f"{_NAME}.json_schema",
        )
    schema = checked_schema(wrapper.get("schema"), f"{_NAME}.json_schema.schema")
    return Structure(StructureKind.JSON_SCHEMA, schema, _NAME, ".json_schema")


def _grammar(value: dict[str, Any]) -> Structure:
    source = value.get("grammar")
    if not isinstance(source, str) or not source:
        raise InvalidParameterError(
            f"'{_NAME}.grammar' must be a non-empty string. Given: {shown(source)}.",
            param=f"{_NAME}.grammar",
        )
    return Structure(StructureKind.GBNF, source, _NAME, ".grammar")
