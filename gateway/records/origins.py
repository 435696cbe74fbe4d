"""Origins of web pages, in the form in which browsers send them in the header `Origin`."""

import re
from collections.abc import Collection
from typing import Final

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
