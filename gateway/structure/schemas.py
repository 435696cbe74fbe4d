"""JSON schemas: checks of limits that the compiler lacks."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.structure import lark
from gateway.structure.closing import closed
from gateway.structure.errors import RefusedError
from gateway.structure.limits import MAX_ITEMS, MAX_LENGTH, MAX_NESTING, MAX_PROPERTIES

_BOUNDS: Final[Mapping[str, int]] = {
    "minItems": MAX_ITEMS,
    "maxItems": MAX_ITEMS,
    "minProperties": MAX_PROPERTIES,
    "maxProperties": MAX_PROPERTIES,
    "minLength": MAX_LENGTH,
    "maxLength": MAX_LENGTH,
}
_OPTIONS_KEY = "x-guidance"


def json_from_schema(schema: Any) -> str:
    """Return Lark for JSON that matches a decoded schema, which is an object or a boolean.

    Objects must have their properties in the schema's order, and only those that it names. The
    compiler rejects keywords that it cannot enforce. Unknown keywords have no effect, as JSON
    Schema specifies.
    """
    if isinstance(schema, bool):
        if not schema:
            raise RefusedError("the schema false matches nothing")
        return lark.json_value({})
    if not isinstance(schema, dict):
        raise RefusedError("a schema must be an object or a boolean")
    _check(schema)
    # With these options, a client could switch off the enforcement of keywords.
    schema = {key: value for key, value in schema.items() if key != _OPTIONS_KEY}
    return lark.json_value(closed(schema))


def _check(schema: dict[str, Any]) -> None:
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_NESTING:
            raise RefusedError(f"the schema must not be nested deeper than {MAX_NESTING} levels")
        if isinstance(value, dict):
            _check_numbers(value)
        pending += ((child, depth + 1) for child in _children(value))


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _check_numbers(schema: dict[str, Any]) -> None:
    for keyword, most in _BOUNDS.items():
        number = schema.get(keyword)
        if isinstance(number, int | float) and number > most:
            raise RefusedError(f"'{keyword}' must be at most {most}. Given: {number}")
