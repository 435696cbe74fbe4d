"""The exactness class of an engine: a digest of what its results depend on beside the request."""

import hashlib
from collections.abc import Mapping

import msgspec

from contract.messages import Exactness

_DIGEST_CHARACTERS = 12


def digest_of(value: object) -> str:
    """Return a short digest of anything that JSON can represent."""
    content = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(content).hexdigest()[:_DIGEST_CHARACTERS]


def exactness_of(facts: Mapping[str, str]) -> Exactness:
    """Return the class of the engines of which these facts are true."""
    known = dict(sorted(facts.items()))
    return Exactness(digest_of(known), known)


class WrongClassError(Exception):
    """The engine has another exactness class than its pool requires."""

    def __init__(self, exactness: Exactness, required: str) -> None:
        facts = ", ".join(f"{name}: {value}" for name, value in exactness.facts.items())
        super().__init__(
            f"The exactness class of this worker is {exactness.digest}, but SLUICE_REQUIRED_CLASS "
            f"is {required}. The class of this worker follows from: {facts}"
        )
