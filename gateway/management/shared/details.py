"""Details of a change in the audit log."""

from collections.abc import Mapping
from enum import Enum
from typing import Any


def details_of(options: Mapping[str, object]) -> dict[str, Any]:
    """Return options as JSON. The caller must leave out secrets."""
    return {name: _plain(value) for name, value in options.items()}


def _plain(value: object) -> object:
    match value:
        case Mapping():
            return {str(name): _plain(each) for name, each in value.items()}
        case frozenset():
            return sorted(str(each) for each in value)
        case tuple():
            return [str(each) for each in value]
        case Enum():
            return value.value
        case _:
            return value
