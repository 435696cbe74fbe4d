"""Reading server-sent events strictly: whatever is not exactly in the form we promise is an error."""

import json
from collections.abc import Iterable
from typing import Any

PREFIX = b"data: "
DONE = b"data: [DONE]"
KEEP_ALIVE = b": keep-alive"


def split_events(body: bytes) -> list[bytes]:
    """Return the events of a whole stream, each of which is one line followed by an empty one."""
    assert body.endswith(b"\n\n"), f"unfinished event: {body[-80:]!r}"
    events = body[:-2].split(b"\n\n")
    for event in events:
        assert b"\n" not in event, f"more than one line: {event!r}"
        assert b"\r" not in event, f"carriage return: {event!r}"
        assert event.startswith(PREFIX) or event == KEEP_ALIVE, (
            f"neither data nor comment: {event!r}"
        )
    return events


def parse_chunks(body: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream, which must end with `[DONE]` and nothing after it."""
    events = split_events(body)
    assert events[-1] == DONE
    assert DONE not in events[:-1]
    return [json.loads(event[len(PREFIX) :]) for event in events[:-1] if event != KEEP_ALIVE]


def texts_by_choice(chunks: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return the joined text of each choice. Each must finish exactly once, with its last chunk."""
    texts: dict[int, str] = {}
    finished: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in finished, f"choice {index} goes on after its end"
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                finished.add(index)
    assert finished == set(texts), f"never finished: {set(texts) - finished}"
    return texts
