"""Event ids: equal in every rendering, so that any gateway can resume after any of them."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contract.dialect import Dialect
from contract.messages import TokenLogprob
from contract.outcomes import FailureCode
from gateway.completions.queue.generation import Reply
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.sse import DONE, ChunkRenderer
from gateway.records.errors import ServiceUnavailableError, SlowReaderError
from tests.gateway.replies import LENGTH, STOP, completion, ended, failed, said, scored
from tests.support.cases import all_cases
from tests.support.events import numbered_events, parse_chunks

LOGPROB = TokenLogprob("a", -0.5, 0, [("a", -0.5)], [9])
REPLIES = [
    scored([TokenLogprob("p", None, 0)]),
    said("a", logprobs=[LOGPROB]),
    said(""),  # Held back, so without an event.
    said("b", choice=1, logprobs=[LOGPROB]),
    said("", finish=LENGTH),
    said("c", choice=1, finish=STOP, stop_reason="\n"),
    ended(),
]
FAILING = [*REPLIES[:4], failed()]


def rendered(
    answer: Completion,
    replies: Sequence[Reply],
    *,
    skip: int = 0,
    batch: int = 1,
    has_ids: bool = True,
) -> bytes:
    """Render replies in batches, and the failure if there is one."""
    renderer = ChunkRenderer(answer, skip=skip, has_ids=has_ids)
    body = b"".join(
        renderer.render(replies[start : start + batch]) for start in range(0, len(replies), batch)
    )
    return body if renderer.failure is None else body + renderer.render_failure(renderer.failure)


OPTIONS = st.fixed_dictionaries(
    {
        "dialect": st.sampled_from(Dialect),
        "logprobs": st.sampled_from([None, 0]),
        "suffix": st.sampled_from(["", "}\n"]),
        "prompt_texts": st.sampled_from([None, ["A prompt"]]),
        "return_token_ids": st.booleans(),
        "include_usage": st.booleans(),
    }
)


@given(OPTIONS, st.sampled_from([REPLIES, FAILING]), st.integers(1, 7), st.integers(0, 12))
def test_events_after_an_event_id_are_the_same_in_every_rendering(
    options: dict[str, Any], replies: list[Reply], batch: int, skip: int
) -> None:
    answer = completion(n=2, **options)
    first = numbered_events(rendered(answer, replies))
    assert [number for _, _, number in first] == list(range(1, len(first) + 1))
    assert {request_id for _, request_id, _ in first} == {answer.id}
    assert first[-1][0] == DONE

    again = numbered_events(rendered(answer, replies, skip=skip, batch=batch))
    assert [(id_, number) for _, id_, number in again] == [
        (id_, number) for _, id_, number in first[skip:]
    ]
    if answer.request.profile.name in (Dialect.OPENAI, Dialect.FIREWORKS, Dialect.VLLM):
        assert again == first[skip:]
        # Without ids, the events are the same, so that a client can count them.
        plain = rendered(answer, replies, batch=batch, has_ids=False)
        assert b"\nid:" not in plain
        assert numbered_events(plain) == first


@all_cases(
    "options",
    [{"timings_per_token": True}, {"include_obfuscation": True}, {"include_usage": True}],
    ids=["timings", "obfuscation", "usage"],
)
@all_cases("skip", range(7))
def test_event_ids_do_not_depend_on_times_and_padding(options: dict[str, Any], skip: int) -> None:
    answer = completion(n=2, **options)
    first = [number for _, _, number in numbered_events(rendered(answer, REPLIES))]
    body = rendered(answer, REPLIES, skip=skip)
    assert [number for _, _, number in numbered_events(body)] == first[skip:]


def test_client_that_has_every_event_gets_nothing() -> None:
    answer = completion(n=2)
    total = len(numbered_events(rendered(answer, REPLIES)))
    assert rendered(answer, REPLIES, skip=total) == b""
    assert rendered(answer, REPLIES, skip=total + 5) == b""


def test_failure_of_the_response_has_an_event_id() -> None:
    answer = completion(n=2)
    events = numbered_events(rendered(answer, FAILING))
    assert [number for _, _, number in events] == [1, 2, 3, 4]
    assert b"engine_dead" in events[2][0]
    assert events[3][0] == DONE
    assert numbered_events(rendered(answer, FAILING, skip=3)) == events[3:]


@all_cases("dialect", [Dialect.OPENAI, Dialect.FIREWORKS])
@all_cases("include_usage", [False, True])
@all_cases("reported", [0, 2])
def test_failure_of_the_connection_has_no_event_id(
    dialect: Dialect, *, include_usage: bool, reported: int
) -> None:
    answer = completion(dialect=dialect, n=2, include_usage=include_usage)
    renderer = ChunkRenderer(answer, has_ids=True)
    before = renderer.render(REPLIES[: 2 * reported])
    error = SlowReaderError("The client reads too slowly; the request was cancelled.")
    last = renderer.render_failure(error)
    # A client without ids counts these chunks (docs/api.md).
    chunks = parse_chunks(before + last)
    counted = [chunk for chunk in chunks if chunk.get("choices") and "error" not in chunk]
    assert len(counted) == reported
    events = numbered_events(last)
    assert {number for _, _, number in events} == {reported}
    assert b"slow_reader" in events[-2][0]
    assert events[-1][0] == DONE


@all_cases("code", [FailureCode.TAKEN_OVER, FailureCode.GATEWAY_STOPPING])
def test_response_that_continues_at_another_gateway_has_not_failed(code: FailureCode) -> None:
    answer = completion(n=2)
    replies = [*REPLIES[:4], failed(code)]
    events = numbered_events(rendered(answer, replies))
    assert [number for _, _, number in events] == [1, 2, 2, 2]
    assert events[-1][0] == DONE


def test_client_that_resumes_before_new_events_keeps_its_position() -> None:
    renderer = ChunkRenderer(completion(), skip=5, has_ids=True)
    assert renderer.render([said("a")]) == b""
    events = numbered_events(renderer.render_failure(ServiceUnavailableError("It drains.")))
    assert {number for _, _, number in events} == {5}
