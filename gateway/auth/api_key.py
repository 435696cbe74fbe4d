"""API key format: `sk-PREFIX-SECRET`.

The prefix (12 characters) is public: it identifies a key in look-ups and in messages. The secret
(40 characters) ends with a checksum, so the gateway rejects a mistyped or invented key without a
database query.
"""

import hashlib
import re
import secrets
import string
import zlib
from typing import Final, Self

from typing_extensions import override

ALPHABET: Final = string.digits + string.ascii_uppercase + string.ascii_lowercase
PREFIX_CHARACTERS: Final = 12
SECRET_CHARACTERS: Final = 40
CHECKSUM_CHARACTERS: Final = 6

_RANDOM_CHARACTERS = SECRET_CHARACTERS - CHECKSUM_CHARACTERS
_PATTERN = re.compile(
    rf"sk-(?P<prefix>[A-Za-z0-9]{{{PREFIX_CHARACTERS}}})-[A-Za-z0-9]{{{SECRET_CHARACTERS}}}"
)
_WHOLE_KEY = re.compile(rf"sk-([A-Za-z0-9]{{{PREFIX_CHARACTERS}}})(-.*)?", re.DOTALL)


def public_name(key: str) -> str:
    """Return a name of the key that is safe to show, even if the caller passes the whole key."""
    whole = _WHOLE_KEY.fullmatch(key)
    return key if whole is None else whole[1]


class MalformedKeyError(ValueError):
    """The text is not an API key. The message never contains it."""


class ApiKey:
    """A complete API key, which only `reveal` returns as text."""

    __slots__ = ("_text", "prefix")

    def __init__(self, text: str, prefix: str) -> None:
        self._text = text
        self.prefix = prefix

    @classmethod
    def generate(cls) -> Self:
        """Return a new random key."""
        prefix = _random(PREFIX_CHARACTERS)
        body = f"sk-{prefix}-{_random(_RANDOM_CHARACTERS)}"
        return cls(body + checksum(body), prefix)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the key that a client sent, and check its format and checksum."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise MalformedKeyError("not of the form sk-PREFIX-SECRET")
        if checksum(text[:-CHECKSUM_CHARACTERS]) != text[-CHECKSUM_CHARACTERS:]:
            raise MalformedKeyError("the checksum at the end is wrong")
        return cls(text, match["prefix"])

    def reveal(self) -> str:
        """Return the complete key, to show to its owner and nobody else."""
        return self._text

    def digest(self) -> bytes:
        """Return the SHA-256 of the complete key; only this digest is stored."""
        return digest(self._text)

    @override
    def __repr__(self) -> str:
        return f"ApiKey(sk-{self.prefix}-***)"


def digest(text: str) -> bytes:
    """Return the SHA-256 under which a key is cached and stored.

    A fast hash is enough: a key has 200 random bits, so there is nothing to guess.
    """
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def checksum(text: str) -> str:
    """Return the CRC-32 of the text in base 62."""
    value = zlib.crc32(text.encode())
    characters = ""
    for _ in range(CHECKSUM_CHARACTERS):
        value, remainder = divmod(value, len(ALPHABET))
        characters = ALPHABET[remainder] + characters
    return characters


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))
