"""Reading a JSON body: bounded depth, no NaN, and one clear message for each wrong parameter."""

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails

from gateway.errors import (
    MAX_SHOWN_CHARACTERS,
    ApiError,
    InvalidJsonError,
    InvalidParameterError,
    MissingParameterError,
    shown,
)

MAX_DEPTH = 64
"""Nesting of objects and arrays in a body."""

MAX_PARAMETERS = 256
"""Parameters of a body, those that nobody knows included."""

Model = TypeVar("Model", bound=BaseModel)

_decode = msgspec.json.Decoder().decode


def _integral(value: object) -> object:
    """Read 5.0 as 5, as JSON Schema does; some clients only have one number type."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


INTEGRAL = BeforeValidator(_integral)
"""To be the last annotation of an `int`, after its bounds: then the OpenAPI page shows them."""


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`. Raise InvalidJsonError for anything else."""
    try:
        value = _decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJsonError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidJsonError(f"The body must be a JSON object. Given: {shown(value)}.")
    # Most bodies open fewer brackets than the limit, so that nothing has to be walked.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def validate(model: type[Model], value: dict[str, Any]) -> Model:
    """Check `value` against `model`; null counts as absent. Raise for the first wrong parameter."""
    if len(value) > MAX_PARAMETERS:
        raise InvalidParameterError(
            f"The body must have at most {MAX_PARAMETERS} parameters. Given: {len(value)}."
        )
    present = {name: item for name, item in value.items() if item is not None}
    try:
        return model.model_validate(present)
    except ValidationError as error:
        raise _parameter_error(error.errors(include_url=False)[0]) from None


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)  # type: ignore[attr-defined]
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidJsonError:
    return InvalidJsonError(f"The body is nested too deeply; at most {MAX_DEPTH} levels are read.")


_EXPECTATIONS = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of at most 64 bits",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
}


def _parameter_error(error: ErrorDetails) -> ApiError:
    # The keys of an object are the client's own words and may have any length.
    path = ".".join(str(part)[:MAX_SHOWN_CHARACTERS] for part in error["loc"]) or "body"
    kind, context, value = error["type"], error.get("ctx", {}), shown(error["input"])
    if kind == "missing":
        return MissingParameterError(path)
    if kind in _EXPECTATIONS:
        return InvalidParameterError(
            f"'{path}' must be {_EXPECTATIONS[kind]}. Given: {value}.", param=path
        )
    bounds = {
        "greater_than": ("> ", "gt"),
        "greater_than_equal": (">= ", "ge"),
        "less_than": ("< ", "lt"),
        "less_than_equal": ("<= ", "le"),
    }
    if kind in bounds:
        sign, name = bounds[kind]
        return InvalidParameterError(
            f"'{path}' must be {sign}{context[name]}. Given: {value}.", param=path
        )
    if kind in ("enum", "literal_error"):
        return InvalidParameterError(
            f"'{path}' must be one of {context['expected']}. Given: {value}.", param=path
        )
    if kind == "value_error":
        return InvalidParameterError(f"'{path}' {context['error']}. Given: {value}.", param=path)
    return InvalidParameterError(f"'{path}': {error['msg']}. Given: {value}.", param=path)
