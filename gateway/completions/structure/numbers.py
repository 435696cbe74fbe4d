"""Numbers of JSON schemas, which the compiler reads as 64-bit floating-point numbers."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from gateway.completions.structure.errors import RefusedError

_LARGEST_INTEGER: Final = 2**63 - 1
"""The largest integer in a range that the compiler supports. It reads it exactly."""
_LEAST_INTEGER: Final = 1024 - 2**63
_LARGEST_NUMBER: Final = 10**18
"""The largest bound of a range that is not of integers."""
_LARGEST_WITHOUT_GAPS: Final = 2**53
_LARGEST_FACTOR: Final = (2**32 - 10) // 10
"""The largest `multipleOf`, without its decimal point, for which the compiler does not overflow."""


def exact(schema: dict[str, Any], keyword: str) -> Any:
    """Return a keyword's value, unless the compiler would read another number.

    Bounds beyond the largest ones that the compiler supports become these, as in the ranges of
    64-bit integers that generators write: the range gets smaller. Raises RefusedError for other
    numbers.
    """
    value = schema[keyword]
    if keyword in {"const", "enum"}:
        for each in _nested(value):
            if isinstance(each, int) and not isinstance(each, bool):
                _check_exact(keyword, each, most=_LARGEST_INTEGER)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        return value
    elif keyword == "multipleOf":
        _, digits, exponent = Decimal(str(value)).as_tuple()
        factor = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
        if factor > _LARGEST_FACTOR:
            raise RefusedError(f"'multipleOf' must be at most {_LARGEST_FACTOR}. Given: {value}")
    elif keyword in {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}:
        return _exact_bound(schema, keyword, value)
    return value


def _exact_bound(schema: dict[str, Any], keyword: str, value: float) -> float:
    types = schema.get("type")
    is_integer = types == "integer" or (isinstance(types, list) and "number" not in types)
    most = _LARGEST_INTEGER if is_integer else _LARGEST_NUMBER
    least = _LEAST_INTEGER if is_integer else -_LARGEST_NUMBER
    is_lower = keyword.endswith("inimum")
    if (value < least) if is_lower else (value > most):
        return least if is_lower else most
    if "excl" in keyword or schema.get(f"exclusive{keyword.capitalize()}") is True:
        # The compiler adds one to a lower bound of integers, and subtracts one from an upper one.
        most = _LARGEST_WITHOUT_GAPS - ((value > 0) is is_lower)
    if is_integer or isinstance(value, int):
        _check_exact(keyword, value, most=most)
    return value


def check_numbers(schema: Any) -> None:
    """Raise RefusedError for a number of a schema that the compiler would read as another one."""
    for value in _nested(schema):
        for keyword, given in value.items() if isinstance(value, dict) else ():
            if (end := exact(value, keyword)) != given:
                raise RefusedError(f"'{keyword}' cannot be beyond {end}. Given: {given}")


def _check_exact(keyword: str, number: float, *, most: int) -> None:
    if abs(number) > most or (float(number) != number and number != _LARGEST_INTEGER):
        raise RefusedError(
            f"the compiler does not read the integer {number} of '{keyword}' exactly: it must be "
            f"from -{(end := min(most, _LARGEST_WITHOUT_GAPS))} to {end}, or a string"
        )


def _nested(root: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in it."""
    pending = [root]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
