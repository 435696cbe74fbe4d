"""Signatures of the audit log's head, by a key that is not in the database.

An attacker who can write to the database can recompute all hashes, but no signature. A signed head
is an entry of the log. `gateway.jobs.audit_heads` also stores it outside, which reveals that newer
entries were removed.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

ACTION: Final = "audit.sign"
"""The action of entries whose details are the signed head of the previous entry."""

_DOMAIN: Final = b"sluice audit head"
_TEXT: Final = re.compile(r"audit-head (\d{1,15}) ([0-9a-f]{64}) ([0-9a-f]{64})\b")


@dataclass(frozen=True, slots=True)
class SignedHead:
    """The hash of an entry, which covers all entries up to it."""

    sequence: int
    hash: str
    signature: str

    @override
    def __str__(self) -> str:
        """Return the head in the format that is stored outside the database."""
        return f"audit-head {self.sequence} {self.hash} {self.signature}"

    @property
    def details(self) -> dict[str, Any]:
        """The head as the details of an entry."""
        return {"sequence": self.sequence, "hash": self.hash, "signature": self.signature}

    @classmethod
    def of(cls, details: Mapping[str, Any]) -> "SignedHead | None":
        """Return the head in an entry's details, or None."""
        match details:
            case {"sequence": int(sequence), "hash": str(hash_), "signature": str(signature)}:
                return cls(sequence, hash_, signature)
            case _:
                return None

    @classmethod
    def all_in(cls, text: str) -> "list[SignedHead]":
        """Return every head in a text; other lines are skipped."""
        return [cls(int(number), *rest) for number, *rest in _TEXT.findall(text)]


class HeadSigner:
    """Signs with the first of its keys (HMAC-SHA-256), and accepts signatures by any of them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def sign(self, sequence: int, head: bytes) -> SignedHead:
        """Return the signed hash of an entry."""
        signature = _signature(self._keys[0], sequence, head)
        return SignedHead(sequence, head.hex(), signature)

    def is_genuine(self, head: SignedHead) -> bool:
        """Whether one of the keys made the signature."""
        content = bytes.fromhex(head.hash)
        signatures = [_signature(key, head.sequence, content) for key in self._keys]
        given = head.signature.encode()
        return any(hmac.compare_digest(each.encode(), given) for each in signatures)


def _signature(key: bytes, sequence: int, head: bytes) -> str:
    return hmac.new(key, b"%s %d %s" % (_DOMAIN, sequence, head), hashlib.sha256).hexdigest()
