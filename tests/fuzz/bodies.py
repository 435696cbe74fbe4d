"""Requests made by chance, but the same ones every time."""

import json
from dataclasses import dataclass

from hypothesis import strategies as st
from typing_extensions import override

from contract.dialect import Dialect
from tests.fuzz.values import JUNK, ODD, SOUND
from tests.support.stack import MODEL

NAMES = sorted({*SOUND, *ODD})
FEW_TOKENS = '"max_tokens": 2'


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    dialect: str | None
    body: bytes

    @override
    def __str__(self) -> str:
        """Show it so that it can be sent again."""
        return f"X-Api-Dialect: {self.dialect}\n{self.body!r}"


def _texts(table: dict[str, tuple[object, ...]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(json.dumps(value) for value in values) for name, values in table.items()}


_SOUND, _ODD = _texts(SOUND), _texts(ODD)


@st.composite
def members(draw: st.DrawFn, *, oddity: int) -> str:
    """Return one `"name": value`. `oddity` of ten are odd or junk."""
    name = draw(st.sampled_from(NAMES))
    values = JUNK if oddity == 10 else _SOUND.get(name, _ODD.get(name, JUNK))
    if draw(st.integers(1, 10)) <= oddity:
        values = draw(st.sampled_from((_ODD.get(name, JUNK), JUNK)))
    return f"{json.dumps(name)}: {draw(st.sampled_from(values))}"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a request: half of them are sound in every part, few are not even JSON."""
    oddity = draw(st.sampled_from((0, 0, 0, 1, 2, 5)))
    stream = draw(st.sampled_from(('"stream": true', '"stream": false')))
    parts = [
        f'"model": "{MODEL}"',
        f'"prompt": {draw(st.sampled_from(_SOUND["prompt"]))}',
        *draw(st.lists(members(oddity=oddity), max_size=5)),
        stream,
        FEW_TOKENS,
    ]
    body = ("{" + ", ".join(parts) + "}").encode()
    if oddity == 5 and draw(st.booleans()):
        body = draw(mangled(body))
    return Case(draw(st.sampled_from((None, *(each.value for each in Dialect)))), body)


@st.composite
def mangled(draw: st.DrawFn, body: bytes) -> bytes:
    """Return the bytes with a piece cut out and another put in."""
    start = draw(st.integers(0, len(body)))
    end = draw(st.integers(start, min(start + 20, len(body))))
    piece = draw(st.sampled_from((b"", b"\xff", b"\xc3", b"\x00", b"{", b"]", b'"', b",,", b"\\u")))
    return body[:start] + piece + body[end:]
