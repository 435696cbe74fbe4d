"""Numbers in JSON schemas: the compiler reads all of them as 64-bit floating-point numbers."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from gateway.structure.errors import RefusedError

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
        for number in _integers(value):
            _check(keyword, number, most=_LARGEST_INTEGER)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        return value
    elif keyword == "multipleOf":
        _, digits, exponent = Decimal(str(value)).as_tuple()
        factor = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
        if factor > _LARGEST_FACTOR:
            raise RefusedError(f"'multipleOf' must be at most {_LARGEST_FACTOR}. Given: {value}")
    elif keyword in {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"}:
        types = schema.get("type")
        is_integer = types == "integer" or (isinstance(types, list) and "number" not in types)
        most = _LARGEST_INTEGER if is_integer else _LARGEST_NUMBER
        least = _LEAST_INTEGER if is_integer else -_LARGEST_NUMBER
        is_lower = keyword.endswith("inimum")
        if (value < least) if is_lower else (value > most):
            return least if is_lower else most
        if isinstance(value, int):
            # The compiler adds one to exclusive bounds.
            _check(keyword, value, most=_LARGEST_WITHOUT_GAPS if "excl" in keyword else most)
    return value


def _check(keyword: str, number: int, *, most: int) -> None:
    if abs(number) > most or (float(number) != number and number != _LARGEST_INTEGER):
        raise RefusedError(
            f"the compiler does not read the integer {number} of '{keyword}' exactly: it must be "
            f"at most {_LARGEST_WITHOUT_GAPS}, or a string"
        )


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _integers(each)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
