"""Validation of names, ids and origins of web pages in user input."""

import re
from collections.abc import Collection, Mapping
from typing import Final

from gateway.records.errors import InvalidParameterError, NotFoundError, must, shown

MAX_NAME_CHARACTERS: Final = 200

_EMAIL = re.compile(r"[!-?A-~]+@[A-Za-z0-9.-]+")
_NEW_ID = re.compile(r"[a-z0-9-]{1,63}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,63}")
_UNPRINTABLE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
"""Control characters and line separators, which corrupt tables and logs, the characters that change
the direction of text or have no width, which let one name look like another, and surrogates."""


def is_storable(text: str) -> bool:
    """Whether a text has neither lone surrogates nor control characters, of direction included.

    PostgreSQL rejects the control character NUL.
    """
    return _UNPRINTABLE.search(text) is None


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


def checked_email(email: str, *, param: str = "email") -> str:
    """Return an e-mail address in lower case. Raises InvalidParameterError.

    It must be ASCII: lower case maps other letters, such as the Kelvin sign, to letters of ASCII.
    """
    if len(email) > MAX_NAME_CHARACTERS or _EMAIL.fullmatch(email) is None:
        rule = f"be an address of at most {MAX_NAME_CHARACTERS} ASCII characters"
        raise must(param, f"{rule}, such as ada@example.com", email)
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


ANY_ORIGIN: Final = "*"
MAX_ORIGINS: Final = 100
MAX_ORIGIN_CHARACTERS: Final = 300

_ORIGIN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9_.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?"
)
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def read_origins(texts: Collection[str]) -> tuple[str, ...]:
    """Return the origins in lower case and without default ports and duplicates.

    Raises ValueError, whose message follows the name of a parameter.
    """
    if len(texts) > MAX_ORIGINS:
        raise ValueError(f"must contain at most {MAX_ORIGINS} origins. Given: {len(texts)}.")
    return tuple(dict.fromkeys(map(_read, texts)))


def allows_origin(origins: Collection[str], origin: str) -> bool:
    """Whether the list contains this value of the header `Origin`, or `*`."""
    return origin in origins or ANY_ORIGIN in origins


def _read(text: str) -> str:
    if text == ANY_ORIGIN:
        return text
    found = _ORIGIN.fullmatch(text.lower()) if len(text) <= MAX_ORIGIN_CHARACTERS else None
    if found is None:
        raise ValueError(
            f"must contain '{ANY_ORIGIN}' or origins SCHEME://HOST[:PORT] without a path, of at "
            f"most {MAX_ORIGIN_CHARACTERS} characters. Given: {text[:MAX_ORIGIN_CHARACTERS]!r}."
        )
    scheme, host, port = found["scheme"], found["host"], found["port"]
    if port is None or int(port) == _DEFAULT_PORTS.get(scheme):
        return f"{scheme}://{host}"
    if not 0 < int(port) < 2**16:
        raise ValueError(f"must contain ports from 1 to 65535. Given: {text!r}.")
    return f"{scheme}://{host}:{int(port)}"
