"""The parts of a choice, in the order in which the model wrote them."""

from typing import Any

import pytest

from contract.messages import CallPiece, Delta
from contract.outcomes import FinishReason
from gateway.completions.rendering.content_parts import Change, PartKind, PartStream
from gateway.dialects.request import ChatRequest, Tool, ToolMode, ToolUse
from tests.gateway.replies import completion

REASONING, TEXT, CALL = PartKind
TOOLS = [Tool("a", {}, is_strict=False), Tool("b", {}, is_strict=False)]


def delta(text: str = "", *, reasoning: str = "", calls: Any = (), end: bool = False) -> Delta:
    pieces = [CallPiece(*each) for each in calls]
    finish = FinishReason.STOP if end else None
    return Delta(1, 0, 0, 0, text, [1], finish, reasoning=reasoning, calls=pieces)


def parts_of(*deltas: Delta, **use: Any) -> list[tuple[PartKind, str, str]]:
    tool_use = ToolUse(TOOLS, ToolMode.AUTO, **use)
    stream = PartStream(completion(chat=ChatRequest(messages=[]), tool_use=tool_use).request)
    events = [event for each in deltas for event in stream.add(each)]
    # One part is open at a time, and each begins and ends once.
    order = [(each.part.number, each.change) for each in events if each.change is not Change.GROWN]
    numbers = range(len(stream.parts))
    assert order == [(n, change) for n in numbers for change in (Change.BEGUN, Change.ENDED)]
    for part in stream.parts:
        texts = [each.text for each in events if each.part is part]
        assert "".join(texts) == part.text
    return [(each.kind, each.name, each.text) for each in stream.parts]


END = delta(end=True)


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([END], []),
        ([delta("a"), delta(" "), delta("b"), END], [(TEXT, "", "a b")]),
        (
            [delta(reasoning="r"), delta("\n\n"), delta("a"), delta(reasoning="s"), END],
            [(REASONING, "", "r"), (TEXT, "", "\n\na"), (REASONING, "", "s")],
        ),
        # White space before a call, or at the end, makes no part.
        (
            [
                delta("\n"),
                delta(calls=[(0, "a", "")]),
                delta(calls=[(0, "", "{}")]),
                delta("\n"),
                END,
            ],
            [(CALL, "a", "{}")],
        ),
        # What belongs to the open call comes first, then text, then the next call.
        (
            [
                delta("t"),
                delta(calls=[(0, "a", '{"x"')]),
                delta("u", calls=[(0, "", ":1}"), (1, "b", "{")]),
                delta(calls=[(1, "", "}")], end=True),
            ],
            [(TEXT, "", "t"), (CALL, "a", '{"x":1}'), (TEXT, "", "u"), (CALL, "b", "{}")],
        ),
    ],
)
def test_parts_follow_the_order_of_the_deltas(
    deltas: list[Delta], expected: list[tuple[PartKind, str, str]]
) -> None:
    assert parts_of(*deltas) == expected


@pytest.mark.parametrize(
    ("use", "name"), [({"allowed": ("b",)}, "b"), ({"is_parallel": False}, "a")]
)
def test_calls_that_are_not_returned_make_no_part(use: dict[str, Any], name: str) -> None:
    calls = [delta(calls=[(0, "a", "{}")]), delta(calls=[(1, "b", "{}")]), END]
    assert parts_of(*calls, **use) == [(CALL, name, "{}")]
