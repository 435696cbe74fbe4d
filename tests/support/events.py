"""A strict reader of server-sent events: any deviation from the documented form is an error."""

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

PREFIX = b"data: "
DONE = b"data: [DONE]"
KEEP_ALIVES = re.compile(rb"(?m)(?<=^data: \{) +")
"""White space in the JSON of the event after a silence, by which a stream is kept alive."""
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_EVENT = re.compile(
    rb"(?:event: [a-z_.]+\n)?"
    rb"(data: [^\r\n]*)(?:\nid: ((?:(?:chat)?cmpl-|msg_|resp_)[0-9a-z]+):([0-9]+))?"
)


def numbered_events(body: bytes) -> list[tuple[bytes, str, int]]:
    """Return the data line, the request id and the number of each event of a whole stream.

    Each event is one line, or two lines if the events have ids, followed by an empty line. The
    events of Messages and Responses have their type in a line before. Events without ids are
    counted from 1, and have the id in the first chunk. Keep-alives are removed.
    """
    assert body.endswith(b"\n\n") or not body, f"unfinished event: {body[-80:]!r}"
    matches: list[re.Match[bytes]] = []
    for event in KEEP_ALIVES.sub(b"", body.replace(PING, b""))[:-2].split(b"\n\n") if body else ():
        match = _EVENT.fullmatch(event)
        assert match, f"no event: {event!r}"
        matches.append(match)
    assert len({match[2] is None for match in matches}) <= 1, "only some events have an id"
    if matches and matches[0][2] is None:
        request_id = json.loads(matches[0][1].removeprefix(PREFIX)).get("id", "")
        return [(match[1], request_id, number) for number, match in enumerate(matches, 1)]
    return [(match[1], match[2].decode(), int(match[3])) for match in matches]


def split_events(body: bytes) -> list[bytes]:
    """Return the data lines of the events of (a part of) a stream, without keep-alives.

    Events must have the ids of one request, numbered without a gap. An event that only ends the
    connection repeats the last id.
    """
    numbered = numbered_events(body)
    assert len({request_id for _, request_id, _ in numbered}) <= 1
    numbers = [number for _, _, number in numbered]
    steps = [after - before for before, after in pairwise(numbers)]
    assert set(steps) <= {0, 1}, f"numbers {numbers}"
    assert steps == sorted(steps, reverse=True), f"numbers {numbers}"
    return [data for data, _, _ in numbered]


def parse_chunks(body: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream, which must end with `[DONE]` and nothing after it."""
    events = split_events(body)
    assert events[-1] == DONE
    assert DONE not in events[:-1]
    return [json.loads(event[len(PREFIX) :]) for event in events[:-1]]


def texts_by_choice(chunks: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return the joined text of each choice. Each must finish exactly once, with its last chunk."""
    texts: dict[int, str] = {}
    finished: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in finished, f"choice {index} continues after its end"
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                finished.add(index)
    assert finished == set(texts), f"never finished: {set(texts) - finished}"
    return texts
