"""Building blocks for parameters: bounds, aliases, and lists that are validated by hand.

A parameter with several shapes is declared as `Any` and validated by hand, so that an invalid value
gets one clear error message. Validation of a list stops at the first invalid entry, however long
the list is.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from contract.sampling import Range
from gateway.dialects.json_types import Schema, schema_of
from gateway.records.errors import MissingParameterError, invalid, must, shown

TOKEN_ID = Range(0, 2**31 - 1)
COUNT = Range(0, 2**31 - 1)

T = TypeVar("T")


def _unwrap(schema: dict[str, Any]) -> None:
    """Join the lines of docstrings, which are the descriptions of the parameters."""
    for field in schema["properties"].values():
        if "description" in field:
            field["description"] = " ".join(field["description"].splitlines())


class Parameters(BaseModel):
    """Base class for the parameters of one topic."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        json_schema_extra=_unwrap,
        use_attribute_docstrings=True,
    )


def bounded(bounds: Range) -> Any:
    """Return the pydantic constraint for a number within `bounds`."""
    return Field(ge=bounds.minimum, le=bounds.maximum)


def typed(kind: str, /, **types: Schema) -> Any:
    """Return the pydantic annotation of a value whose type is written as for `schema_of`."""
    return Field(json_schema_extra=schema_of(kind, **types))


def agreed(**given: T | None) -> T | None:
    """Return the value given under one or several aliases, or None if there is none.

    Raises InvalidParameterError if two aliases have different values.
    """
    present = [(name, value) for name, value in given.items() if value is not None]
    if not present:
        return None
    first, value = present[0]
    for name, other in present[1:]:
        if other != value:
            raise invalid(
                first,
                f"and '{name}' are the same parameter and must be equal. Given: {shown(value)} "
                f"and {shown(other)}.",
                param=name,
            )
    return value


def given_or(value: T | None, default: T) -> T:
    """Return a value, or the default if it is None."""
    return default if value is None else value


def one_of(value: object, path: str, names: Collection[str]) -> Any:
    """Return a value that is None or one of these texts. Raises InvalidParameterError."""
    if value is not None and not (isinstance(value, str) and value in names):
        raise must(path, f"be one of {', '.join(names)}", value)
    return value


def read_boolean(value: object, path: str) -> bool | None:
    """Return a boolean or None. Raises InvalidParameterError."""
    if not isinstance(value, bool | None):
        raise must(path, "be a boolean", value)
    return value


def within(value: int, path: str, bounds: Range) -> int:
    """Return a number within `bounds`. Raises InvalidParameterError."""
    if value < bounds.minimum:
        raise must(path, f"be at least {bounds.minimum}", value)
    if value > bounds.maximum:
        raise must(path, f"be at most {bounds.maximum}", value)
    return value


def non_empty(value: object, path: str) -> str:
    """Return a text that is not empty. Raises InvalidParameterError."""
    if not isinstance(value, str) or not value:
        raise must(path, "be a non-empty string", value)
    return value


def required(value: Mapping[str, Any], name: str, path: str) -> Any:
    """Return the member `name` of the object at `path`. Raises MissingParameterError."""
    if value.get(name) is None:
        raise MissingParameterError(f"{path}.{name}")
    return value[name]


def integer(value: object) -> int | None:
    """Return a JSON number's integer value, or None; booleans are not numbers."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def number(value: object) -> float | None:
    """Return a JSON number, or None if it is another type or too large for arithmetic."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def optional_object(value: object, name: str) -> dict[str, Any]:
    """Return an object, empty if absent. Raises InvalidParameterError."""
    if not isinstance(value, dict | None):
        raise must(name, "be an object", value)
    return value or {}


def read_compared_id(value: object, name: str, member: str) -> str | None:
    """Return `GenerationRequest.compared_id`, which is a member of an optional object."""
    given = optional_object(value, name)
    compared = given.get(member)
    if not isinstance(compared, str | None):
        raise must(f"{name}.{member}", "be a string", compared)
    return (compared or "") if member in given else None


def read_list(value: object, name: str, *, most: int) -> list[Any]:
    """Return a list of at most `most` entries; None becomes []. Raise InvalidParameterError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise must(name, "be an array", value)
    if len(value) > most:
        raise must(name, f"have at most {most} entries", len(value))
    return value


def read_strings(value: object, name: str, *, most: int, longest: int) -> list[str]:
    """Return a list of strings of 1 to `longest` characters. Raise InvalidParameterError."""
    strings = read_list(value, name, most=most)
    for item in strings:
        if not isinstance(item, str):
            raise invalid(name, f"must be an array of strings. Given: {shown(item)} in it.")
        check_length(item, name, longest=longest)
    return strings


def check_length(text: str, name: str, *, longest: int) -> None:
    """Raise InvalidParameterError if a string in a list is empty or too long."""
    if not 0 < len(text) <= longest:
        raise invalid(
            name, f"must have strings of 1 to {longest} characters. Given: {len(text)} characters."
        )


def read_token_ids(value: object, name: str, *, most: int) -> list[int]:
    """Return a list of token ids. Raise InvalidParameterError."""
    return [read_token_id(item, name) for item in read_list(value, name, most=most)]


def read_token_id(value: object, name: str) -> int:
    """Return a token id. Raise InvalidParameterError.

    The check against the model's vocabulary comes later.
    """
    token = integer(value)
    if token is None or not TOKEN_ID.minimum <= token <= TOKEN_ID.maximum:
        raise must(name, "have token ids, which are non-negative integers", value)
    return token
