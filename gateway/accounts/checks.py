"""What names and ids that people give must look like."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Final

from gateway.errors import InvalidParameterError, NotFoundError, shown

MAX_NAME_CHARACTERS: Final = 200

_ID = re.compile(r"[A-Za-z0-9_-]{1,63}")
_UNPRINTABLE: Final = ("Cc", "Cs")
"""Categories of control characters, which would spoil tables and logs, and of halves of characters."""


def is_storable(text: str) -> bool:
    """Whether a text has neither control characters, of which PostgreSQL refuses NUL, nor lone surrogates."""
    return not any(unicodedata.category(character) in _UNPRINTABLE for character in text)


def check_name(name: str, *, param: str = "name") -> None:
    """Refuse an empty or overlong name, and one with control characters."""
    if not 0 < len(name.strip()) <= len(name) <= MAX_NAME_CHARACTERS:
        raise InvalidParameterError(
            f"'{param}' must have 1 to {MAX_NAME_CHARACTERS} characters. Given: {shown(name)}.",
            param=param,
        )
    if not is_storable(name):
        raise InvalidParameterError(
            f"'{param}' must not contain control characters. Given: {shown(name)}.", param=param
        )


def check_not_empty(options: Mapping[str, object]) -> None:
    """Refuse a change that changes nothing."""
    if not options:
        raise InvalidParameterError("Nothing to change: give at least one option.")


def check_known(id_: str, what: str) -> None:
    """Refuse what cannot be the id of anything, without asking the database; `what` is a `tenant`, say."""
    if _ID.fullmatch(id_) is None:
        raise NotFoundError(f"There is no {what} {shown(id_)}.")
