"""JSON schemas as parameters: checks of their shape; their content is compiled elsewhere."""

from typing import Any

from gateway.dialects.wire import parse_object
from gateway.records.errors import InvalidJsonError, must

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
