"""Validation of names and ids in user input."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Final

from gateway.records.errors import InvalidParameterError, NotFoundError, must, shown

MAX_NAME_CHARACTERS: Final = 200

_EMAIL = re.compile(r"[!-?A-~]+@[A-Za-z0-9.-]+")
_NEW_ID = re.compile(r"[a-z0-9-]{1,63}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,63}")
_UNPRINTABLE: Final = ("Cc", "Cs")
"""Unicode categories of control characters, which corrupt tables and logs, and of surrogates."""


def is_storable(text: str) -> bool:
    """Whether a text has neither lone surrogates nor control characters.

    PostgreSQL rejects the control character NUL.
    """
    return not any(unicodedata.category(character) in _UNPRINTABLE for character in text)


def check_name(name: str, *, param: str = "name") -> None:
    """Reject an empty or overlong name, and one with control characters."""
    if not 0 < len(name.strip()) <= len(name) <= MAX_NAME_CHARACTERS:
        raise must(param, f"have 1 to {MAX_NAME_CHARACTERS} characters", name)
    if not is_storable(name):
        raise must(param, "not contain control characters", name)


def check_new_id(id_: str) -> None:
    """Reject text that cannot be the id of a new tenant or plan."""
    if _NEW_ID.fullmatch(id_) is None:
        raise must("id", "have 1 to 63 characters from a-z, 0-9 and '-'", id_)


def checked_email(email: str) -> str:
    """Return an e-mail address in lower case. Raises InvalidParameterError.

    It must be ASCII: lower case maps other letters, such as the Kelvin sign, to letters of ASCII.
    """
    if len(email) > MAX_NAME_CHARACTERS or _EMAIL.fullmatch(email) is None:
        rule = f"be an address of at most {MAX_NAME_CHARACTERS} ASCII characters"
        raise must("email", f"{rule}, such as ada@example.com", email)
    return email.lower()


def check_not_empty(options: Mapping[str, object]) -> None:
    """Reject an update without any changes."""
    if not options:
        raise InvalidParameterError("Nothing to change: specify at least one option.")


def check_known(id_: str, what: str) -> None:
    """Reject text that cannot be an id, without a database query.

    `what` is, for example, a `tenant`.
    """
    if _ID.fullmatch(id_) is None:
        raise NotFoundError(f"There is no {what} {shown(id_)}.")
