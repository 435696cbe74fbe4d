"""Random requests, the same ones in each run."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from typing_extensions import override

from contract.dialect import Dialect
from tests.failures.fuzz.chat_values import CHAT_ODD, CHAT_SOUND
from tests.failures.fuzz.values import JUNK, ODD, SOUND
from tests.support.stack import MODEL

FEW_TOKENS = '"max_tokens": 2'
MOST_MEMBERS = 5

ODDITIES = (0, 0, 0, 1, 2, 5)
"""How many of ten members of a body are odd or junk: half of all bodies are sound in every part."""
NEARLY_SOUND = (0, 0, 0, 1)
"""For bodies of which most reach an engine."""

VERY_ODD = max(ODDITIES)
DIALECTS = (None, *(dialect.value for dialect in Dialect))
SCRAPS = (b"", b"\xff", b"\xc3", b"\x00", b"{", b"]", b'"', b",,", b"\\u")


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    path: str
    dialect: str | None
    body: bytes

    @override
    def __str__(self) -> str:
        """Return it in a form that can be sent again."""
        return f"{self.path}\nX-Api-Dialect: {self.dialect}\n{self.body!r}"


def _texts(table: dict[str, tuple[object, ...]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(json.dumps(value) for value in values) for name, values in table.items()}


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint and its parameters."""

    path: str
    subject: str
    """The parameter that every body has."""
    sound: dict[str, tuple[str, ...]]
    odd: dict[str, tuple[str, ...]]

    @property
    def names(self) -> list[str]:
        """All names of members."""
        return sorted({*self.sound, *self.odd})


COMPLETIONS = Target("/v1/completions", "prompt", _texts(SOUND), _texts(ODD))
CHATS = Target("/v1/chat/completions", "messages", _texts(CHAT_SOUND), _texts(CHAT_ODD))


def different_cases(seed: int, target: Target, oddities: Sequence[int]) -> Iterator[Case]:
    """Yield distinct requests forever; odd values are drawn from `oddities`."""
    chance = Random(seed)
    seen: set[Case] = set()
    while True:
        case = _case(chance, target, chance.choice(oddities))
        if case not in seen:
            seen.add(case)
            yield case


def _case(chance: Random, target: Target, oddity: int) -> Case:
    members = [_member(chance, target, oddity) for _ in range(chance.randint(0, MOST_MEMBERS))]
    parts = [
        f'"model": "{MODEL}"',
        f'"{target.subject}": {chance.choice(target.sound[target.subject])}',
        *members,
        chance.choice(('"stream": true', '"stream": false')),
        FEW_TOKENS,
    ]
    body = ("{" + ", ".join(parts) + "}").encode()
    if oddity == VERY_ODD and chance.random() < 0.5:
        body = _mangled(chance, body)
    return Case(target.path, chance.choice(DIALECTS), body)


def _member(chance: Random, target: Target, oddity: int) -> str:
    name = chance.choice(target.names)
    values = target.sound.get(name, target.odd.get(name, JUNK))
    if chance.randint(1, 10) <= oddity:
        values = chance.choice((target.odd.get(name, JUNK), JUNK))
    return f"{json.dumps(name)}: {chance.choice(values)}"


def _mangled(chance: Random, body: bytes) -> bytes:
    """Return the bytes with one piece cut out and another inserted."""
    start = chance.randint(0, len(body))
    end = chance.randint(start, min(start + 20, len(body)))
    return body[:start] + chance.choice(SCRAPS) + body[end:]
