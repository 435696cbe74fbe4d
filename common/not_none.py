"""Values whose type allows None where the code around them does not."""

from typing import TypeVar

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """Return a value that is not None, as the caller knows. Raises AssertionError if it is."""
    if value is None:
        raise AssertionError("a value is missing that earlier steps provide")
    return value
