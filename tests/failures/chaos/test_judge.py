"""The invariant checks find each error in made-up histories and rows, and no others."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.completions.rendering.tool_calls import call_id
from gateway.records.usage_record import Outcome
from tests.failures.chaos.faults import WEIGHTS, Fault, Kind, schedule
from tests.failures.chaos.history import Behaviour, Ending, History, Stretch
from tests.failures.chaos.judge import (
    cost_of,
    judge_behaviours,
    judge_growth,
    judge_histories,
    judge_paid,
    judge_rows,
    judge_totals,
)
from tests.failures.chaos.machine import Standstill
from tests.failures.chaos.transcript import Transcript


def chunk(
    text: str, ids: list[int], *, index: int = 0, reason: str | None = None, **more: Any
) -> dict[str, Any]:
    piece = {"index": index, "text": text, "token_ids": ids, "finish_reason": reason, **more}
    return {"id": "cmpl-1", "choices": [piece]}


def transcript(*events: dict[str, Any], is_done: bool = True) -> Transcript:
    found = Transcript()
    for event in events:
        found.add(event)
    found.is_done = is_done
    return found


EXPECTED = transcript(
    chunk("one", [1]),
    chunk(" two", [2]),
    chunk(" three", [3], reason="length"),
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}},
)


def test_transcript_does_not_depend_on_chunk_sizes() -> None:
    whole = transcript(
        {
            **chunk("one two three", [1, 2, 3], reason="length"),
            "usage": {"prompt_tokens": 2, "completion_tokens": 3},
        }
    )
    assert whole.difference(EXPECTED) == ""
    assert EXPECTED.difference(whole) == ""


def test_interrupted_stream_may_end_anywhere() -> None:
    assert transcript(is_done=False).difference(EXPECTED) == ""
    assert transcript(chunk("one", [1]), is_done=False).difference(EXPECTED) == ""


@pytest.mark.parametrize(
    ("events", "is_done", "error"),
    [
        ([chunk("one", [1]), chunk("one", [1])], False, "text differs at 3"),
        ([chunk("one", [1]), chunk(" three", [3])], False, "text differs at 5"),
        ([chunk("one", [1]), chunk(" two", [9])], False, "token_ids differs at 1"),
        ([chunk("one two", [1, 2], reason="stop")], False, "text has 7 instead of 13"),
        ([chunk("one", [1])], True, "text has 3 instead of 13"),
        ([chunk("one two three", [1, 2, 3], reason="stop")], True, "ended with ('stop', None)"),
        ([chunk("one", [1], index=1)], False, "choices [1] that were not requested"),
        (
            [chunk("one two three", [1, 2, 3], reason="length"), chunk("", [])],
            False,
            "1 pieces after the end",
        ),
        (
            [
                chunk("one two three", [1, 2, 3], reason="length"),
                {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}},
            ],
            True,
            "usage is",
        ),
        (
            [chunk("one", [1], logprobs={"tokens": ["one"], "text_offset": [0]})],
            False,
            "tokens differs",
        ),
    ],
    ids=[
        "twice",
        "missing",
        "other-token",
        "too-early",
        "incomplete",
        "other-reason",
        "other-choice",
        "after-the-end",
        "usage",
        "log-probabilities",
    ],
)
def test_difference_of_a_completion_is_reported(
    events: list[dict[str, Any]], is_done: bool, error: str
) -> None:
    expected = EXPECTED
    if error == "tokens differs":
        expected = transcript(
            chunk("one", [1], logprobs={"tokens": ["1"], "text_offset": [0]}), is_done=False
        )
    assert error in transcript(*events, is_done=is_done).difference(expected)


def chat_chunk(**piece: Any) -> dict[str, Any]:
    """A chunk of a chat's only choice."""
    return {"id": CHAT_ID, "choices": [{"index": 0, "finish_reason": None, **piece}]}


def reported(**delta: Any) -> dict[str, Any]:
    return chat_chunk(delta=delta)


def called(name: str = "", arguments: str = "", index: int = 0, **changes: Any) -> dict[str, Any]:
    """A chunk with a piece of a call, the first one if there is a name."""
    piece: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name:
        piece |= {"id": call_id(CHAT_ID, 0, index), "type": "function"}
        piece["function"]["name"] = name
    return reported(tool_calls=[piece | changes])


@pytest.mark.parametrize(
    "body",
    [
        {"type": "message", "content": [{"text": "one"}], "stop_reason": "max_tokens"},
        {"object": "response", "output": [{"content": [{"text": "one"}]}], "status": "max_tokens"},
    ],
    ids=["message", "response"],
)
def test_whole_response_of_another_dialect_is_read(body: dict[str, Any]) -> None:
    usage = {"input_tokens": 2, "output_tokens": 1, "cost": 0.000007}
    found = transcript({"id": "x", "usage": usage, **body})
    expected = transcript(chunk("one", [], reason="max_tokens"))
    assert found.difference(replace(expected, usage=found.usage)) == ""
    assert found.usage == {"prompt_tokens": 2, "completion_tokens": 1}
    assert found.cost_micros == 7


CHAT_ID = "chatcmpl-1"
ROLE = reported(role="assistant", content="")
CALLS = [called("f", '{"a"'), called("", ": 1}"), called("g", "{}", index=1)]
CHAT_END = {
    **chat_chunk(delta={}, finish_reason="tool_calls"),
    "usage": {
        "prompt_tokens": 2,
        "completion_tokens": 9,
        "completion_tokens_details": {"reasoning_tokens": 3},
    },
}
CHAT = [ROLE, reported(reasoning_content="so"), reported(content="well"), *CALLS, CHAT_END]
EXPECTED_CHAT = transcript(*CHAT)


def test_chat_transcript_equals_its_whole_response() -> None:
    calls = [
        {
            "id": call_id(CHAT_ID, 0, index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate([("f", '{"a": 1}'), ("g", "{}")])
    ]
    message = {
        "role": "assistant",
        "content": "well",
        "reasoning": "so",
        "tool_calls": calls,
    }
    whole = transcript(
        {
            **chat_chunk(message=message, finish_reason="tool_calls"),
            "usage": CHAT_END["usage"],
        }
    )
    assert whole.difference(EXPECTED_CHAT) == EXPECTED_CHAT.difference(whole) == ""
    for end in range(len(CHAT)):
        assert transcript(*CHAT[:end], is_done=False).difference(EXPECTED_CHAT) == ""


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (CHAT[1:], "the role comes once, and first"),
        ([*CHAT[:3], ROLE], "the role comes once, and first"),
        ([*CHAT[:3], CHAT[1]], "reasoning comes after the answer"),
        ([*CHAT[:4], CHAT[2]], "text has 8 instead of 4"),
        ([ROLE, CHAT[1], CHAT[1]], "reasoning has 4 instead of 2"),
        ([*CHAT[:3], CHAT[2]], "text "),
        ([*CHAT[:4], CHAT[3]], "call 1 begins with"),
        ([*CHAT[:5], CHAT[4]], "calls differs"),
        ([*CHAT[:4], CHAT[5]], "calls differs"),
        ([*CHAT[:3], CHAT[4]], "call -1 continues with"),
        ([*CHAT[:3], called("h", '{"a"')], "calls differs"),
        ([*CHAT[:3], called("f", '{"a"', id="call_1")], "call 0 begins with"),
        ([*CHAT[:3], called("f", '{"a"', type="other")], "call 0 begins with"),
        ([*CHAT[:4], called("", ": 1}", index=1)], "call 0 continues with"),
        ([*CHAT[:4], called("", ": 1}", id="call_1")], "call 0 continues with"),
        ([*CHAT[:5], CHAT_END], "calls has"),
        ([ROLE, reported(function_call={"arguments": "{}"})], "a function's call continues with"),
        ([*CHAT[:6], chat_chunk(delta={}, finish_reason="stop")], "ended with ('stop', None)"),
        (
            [*CHAT[:6], {**CHAT_END, "usage": {"prompt_tokens": 2, "completion_tokens": 9}}],
            "None of them reason instead of 3",
        ),
    ],
)
def test_difference_of_a_chat_is_reported(events: list[dict[str, Any]], error: str) -> None:
    found = transcript(*events, is_done="usage" in events[-1]).difference(EXPECTED_CHAT)
    assert error in found


def history(ending: Ending = Ending.COMPLETE, **fields: Any) -> History:
    found = History(1, "greedy", Behaviour.STREAM, "free", **fields)
    found.request_id = "cmpl-1"
    found.end(ending)
    return found


def broken(began: float, ended: float) -> History:
    found = history(Ending.CUT)
    found.stretches.append(Stretch("gateway-1", began, ended, is_broken=True))
    return found


@pytest.mark.parametrize(
    ("fault", "is_excused"),
    [
        (Fault(Kind.KILL_GATEWAY, "gateway-1", 9.5, 12), True),
        (Fault(Kind.KILL_GATEWAY, "gateway-1", 9.5, 0), True),
        (Fault(Kind.KILL_GATEWAY, "gateway-2", 9.5, 12), False),
        (Fault(Kind.KILL_GATEWAY, "gateway-1", 20, 21), False),
        (Fault(Kind.KILL_GATEWAY, "gateway-1", 1, 2), False),
        (Fault(Kind.SET_CLOCK, "gateway-1", 9.5, 12), False),
        (Fault(Kind.KILL_WORKER, "worker-1", 9.5, 12), False),
    ],
    ids=["at-its-end", "still-going-on", "other-gateway", "later", "earlier", "clock", "worker"],
)
def test_only_a_fault_of_its_gateway_excuses_a_broken_connection(
    fault: Fault, is_excused: bool
) -> None:
    found = judge_histories([broken(5, 10)], [fault])
    assert [each.invariant for each in found] == ([] if is_excused else ["connections"])


def test_hanging_failed_or_wrong_request_is_reported() -> None:
    failed = history(Ending.FAILED)
    failed.transcript.add({"error": {"code": "worker_lost"}})
    complaining = history()
    complaining.add_error("event 4 came after 2")
    found = judge_histories([history(), history(Ending.HUNG), failed, complaining], [])
    assert [each.invariant for each in found] == ["ends", "resumes", "right answers"]


@pytest.mark.parametrize(
    ("away", "killed", "error", "is_excused"),
    [
        ((96, 101), "gateway-1", "status 404: b''", True),
        ((80, 85), "gateway-1", "status 404: b''", False),
        ((101, 105), "gateway-1", "status 404: b''", False),
        ((96, 101), "gateway-2", "status 404: b''", False),
        ((96, 101), "gateway-1", "event 4 came after 2", False),
    ],
    ids=["unstored", "redis-away-before", "redis-away-later", "other-gateway", "other-error"],
)
def test_only_a_stream_that_died_with_its_gateway_and_redis_may_be_unknown(
    away: tuple[float, float], killed: str, error: str, *, is_excused: bool
) -> None:
    unknown = broken(90, 100)
    unknown.add_error(error)
    stopped = Fault(Kind.STOP_REDIS, "redis 1", *away)
    found = judge_histories([unknown], [stopped, Fault(Kind.KILL_GATEWAY, killed, 100, 110)])
    invariants = {each.invariant for each in found} - {"connections"}
    assert invariants == (set() if is_excused else {"right answers"})


@pytest.mark.parametrize(
    ("seconds", "fault", "is_soon"),
    [
        (4, None, True),
        (6, None, False),
        (9, Fault(Kind.KILL_WORKER, "worker-1", 99.5, 101), True),
        (11, Fault(Kind.KILL_WORKER, "worker-1", 99.5, 101), False),
        (9, Fault(Kind.KILL_WORKER, "worker-1", 1, 2), False),
        (15, Fault(Kind.STOP_REDIS, "redis", 99, 106), True),
        (15, Fault(Kind.STOP_GATEWAY, "gateway-2", 99, 106), False),
        (15, Fault(Kind.STOP_GATEWAY, "gateway-1", 99, 106), True),
    ],
)
def test_pause_without_a_fault_is_reported(
    seconds: float, fault: Fault | None, is_soon: bool
) -> None:
    paused = history()
    paused.stretches.append(Stretch("gateway-1", 98, 200, is_broken=False))
    paused.received(100)
    paused.received(100 + seconds)
    found = judge_histories([paused], [] if fault is None else [fault])
    assert [each.invariant for each in found] == ([] if is_soon else ["soon"])


@pytest.mark.parametrize(
    ("standstill", "is_soon"),
    [
        (Standstill(99, 107), True),
        (Standstill(99, 102), False),
        (Standstill(1, 90), False),
        (Standstill(120, 140), False),
    ],
)
def test_stall_of_the_machine_explains_a_pause_of_its_length(
    standstill: Standstill, is_soon: bool
) -> None:
    paused = history()
    paused.received(100)
    paused.received(115)
    found = judge_histories([paused], [], [standstill])
    assert [each.invariant for each in found] == ([] if is_soon else ["soon"])


@pytest.mark.parametrize(
    ("code", "fault", "standstill", "is_soon"),
    [
        ("store_unavailable", None, None, False),
        ("gateway_stopping", None, None, True),
        ("store_unavailable", Fault(Kind.STOP_GATEWAY, "gateway-1", 99, 106), None, True),
        ("store_unavailable", Fault(Kind.STOP_GATEWAY, "gateway-2", 99, 106), None, False),
        ("store_unavailable", Fault(Kind.STOP_REDIS, "redis", 99, 106), None, False),
        ("store_unavailable", None, Standstill(101, 104), True),
        ("store_unavailable", None, Standstill(1, 90), False),
    ],
)
def test_slow_refusal_without_redis_is_reported(
    code: str, fault: Fault | None, standstill: Standstill | None, is_soon: bool
) -> None:
    refused = history(Ending.REFUSED)
    refused.stretches.append(Stretch("gateway-1", 100, 108, is_broken=False, code=code))
    faults = [] if fault is None else [fault]
    found = judge_histories([refused], faults, [] if standstill is None else [standstill])
    assert [each.invariant for each in found] == ([] if is_soon else ["soon"])


def row(outcome: Outcome = Outcome.FINISHED, **fields: Any) -> dict[str, Any]:
    """Return a row that costs what its fields say; a dollar a token or second of audio."""
    counts = {
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "completion_tokens": 3,
        "audio_seconds": 0,
    }
    free = {f"free_{name}": 0 for name in counts}
    prices = dict.fromkeys(
        ("prompt_price", "cached_price", "completion_price", "audio_price"), 10**12
    )
    found = {"request_id": "cmpl-1", "outcome": outcome, **counts, **free, **prices, **fields}
    return {"cost_micros": cost_of(found)} | found


def complete() -> History:
    found = history()
    found.transcript = EXPECTED
    return found


@pytest.mark.parametrize(
    "rows",
    [
        [row()],
        # A response that a reconnecting client resumed has several records.
        [
            row(Outcome.CANCELLED, completion_tokens=1),
            row(request_id="cmpl-1.2", prompt_tokens=0, completion_tokens=2),
        ],
        # An attempt that was lost before its first token is free.
        [
            row(Outcome.LOST, completion_tokens=0, free_prompt_tokens=2),
            row(request_id="cmpl-1.2"),
        ],
    ],
    ids=["one", "continued", "free"],
)
def test_correct_rows_are_accepted(rows: list[dict[str, Any]]) -> None:
    assert judge_rows([complete()], rows) == []


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(), row()],
        [row(completion_tokens=4)],
        [row(prompt_tokens=4)],
        [row(Outcome.LOST)],
    ],
    ids=["none", "twice", "completion", "prompt", "outcome"],
)
def test_wrong_rows_are_reported(rows: list[dict[str, Any]]) -> None:
    found = judge_rows([complete()], rows)
    assert {each.invariant for each in found} == {"one record"}


@pytest.mark.parametrize(
    ("killed", "is_excused"),
    [
        (Fault(Kind.KILL_GATEWAY, "gateway-1", 102, 105), True),
        (Fault(Kind.KILL_GATEWAY, "gateway-2", 102, 105), False),
        (Fault(Kind.KILL_GATEWAY, "gateway-1", 120, 125), False),
        (Fault(Kind.RESTART_GATEWAY, "gateway-1", 92, 104), True),
        (Fault(Kind.RESTART_GATEWAY, "gateway-1", 92, 120), False),
    ],
    ids=["before-redis-was-back", "other-gateway", "later", "stopped-before", "stopped-later"],
)
def test_only_a_gateway_that_died_without_redis_may_skip_settlement_or_count_less(
    killed: Fault, is_excused: bool
) -> None:
    reported = complete()
    reported.stretches.append(Stretch("gateway-1", 98, 100, is_broken=False))
    reported.ended = 100
    faults = [Fault(Kind.KILL_REDIS, "redis", 99.9, 104), killed]
    for tokens, number in ((3, not is_excused), (1, 2 * (not is_excused)), (4, 2 - is_excused)):
        rows = [row(Outcome.LOST, completion_tokens=tokens)]
        found = judge_rows([reported], rows, faults)
        unpaid = ["money"] * (tokens < 3 and not is_excused)
        assert [each.invariant for each in found] == ["one record"] * number + unpaid
    assert [each.invariant for each in judge_rows([reported], [], faults)] == ["one record"]


@pytest.mark.parametrize(
    ("behaviour", "is_excused"),
    [(Behaviour.BACKGROUND, True), (Behaviour.CANCELLING, True), (Behaviour.WHOLE, False)],
)
def test_only_a_background_response_may_have_ended_before_its_client_read_it(
    behaviour: Behaviour, is_excused: bool
) -> None:
    reported = complete()
    reported.behaviour = behaviour
    reported.stretches.append(Stretch("gateway-1", 98, 99, is_broken=False))
    reported.began, reported.ended = 98, 103.5
    faults = [
        Fault(Kind.KILL_REDIS, "redis", 99.9, 104),
        Fault(Kind.KILL_GATEWAY, "gateway-1", 102, 105),
    ]
    found = judge_rows([reported], [row(Outcome.LOST)], faults)
    assert [each.invariant for each in found] == ([] if is_excused else ["one record"])


@pytest.mark.parametrize(
    ("began", "code", "killed", "is_excused"),
    [
        (100, "", Fault(Kind.KILL_GATEWAY, "gateway-1", 102, 105), True),
        (90, "", Fault(Kind.KILL_GATEWAY, "gateway-1", 102, 105), False),
        (100, "store_unavailable", Fault(Kind.KILL_GATEWAY, "gateway-1", 102, 105), False),
        (100, "", Fault(Kind.KILL_GATEWAY, "gateway-2", 102, 105), False),
        (100, "", Fault(Kind.KILL_GATEWAY, "gateway-1", 120, 125), False),
    ],
    ids=["lost", "reserved-before", "refused", "other-gateway", "gateway-lives"],
)
def test_only_a_failover_and_its_gateways_death_may_lose_a_request(
    began: float, code: str, killed: Fault, is_excused: bool
) -> None:
    faults = [Fault(Kind.KILL_BEHIND, "redis 1", 99.9, 104, lost_until=101.5), killed]
    reported = complete()
    reported.stretches.append(Stretch("gateway-1", began, 101, is_broken=False, code=code))
    # An earlier gateway may have refused it.
    reported.began, reported.ended = 90, 101
    found = judge_rows([reported], [], faults)
    assert [each.invariant for each in found] == ([] if is_excused else ["one record"])
    reported.errors = ["status 404: b''", "another text"]
    assert len(judge_histories([reported], faults)) == (1 if is_excused else 2)
    reported.errors = ["the id became cmpl-2 after cmpl-1", "another text"]
    assert len(judge_histories([reported], faults)) == (0 if is_excused else 2)
    unpaid = [row(free_completion_tokens=1)]
    assert len(judge_rows([reported], unpaid, faults)) == (0 if is_excused else 1)


@pytest.mark.parametrize(
    "wrong",
    [row(cost_micros=3_000_000), row(free_completion_tokens=1)],
    ids=["another cost", "unpaid"],
)
def test_unpaid_tokens_are_reported(wrong: dict[str, Any]) -> None:
    assert [each.invariant for each in judge_rows([complete()], [wrong])] == ["money"]


FREE = {"free_prompt_tokens": 2, "free_completion_tokens": 3}


@pytest.mark.parametrize(
    ("rows", "is_right"),
    [
        ([row()], True),
        ([row(Outcome.LOST, **FREE), row(request_id="cmpl-1.late")], True),
        ([row(), row(request_id="cmpl-1.2", prompt_tokens=0)], False),
        ([row(Outcome.LOST, **FREE)], False),
        ([row(free_prompt_tokens=1)], False),
    ],
    ids=["paid", "paid later", "paid twice", "lost", "part of the prompt"],
)
def test_whole_response_costs_what_it_says(rows: list[dict[str, Any]], *, is_right: bool) -> None:
    reported = complete()
    reported.transcript = replace(EXPECTED, cost_micros=5_000_000)
    # Nothing kept a gateway from taking it over.
    reported.stretches = [Stretch(f"gateway-{n}", 90, 100, is_broken=False) for n in (1, 2)]
    reported.ended = 100
    faults = [Fault(Kind.KILL_GATEWAY, f"gateway-{n}", 99 + n, 105) for n in (1, 2)]
    found = judge_rows([reported], rows, faults)
    assert ("money" not in {each.invariant for each in found}) == is_right


def test_paid_row_that_no_client_has_is_reported() -> None:
    rows = [row(request_id=name) for name in ("cmpl-1.late", "cmpl-2", "cmpl-3")]
    rows += [row(Outcome.LOST, request_id="cmpl-4", **FREE)]
    other = complete()
    other.request_id = "cmpl-2"
    assert [each.what for each in judge_paid([complete(), other], rows)] == [
        "no client has the paid cmpl-3 (finished)"
    ]
    # Its client may have received nothing of it, not even its id.
    other.request_id = ""
    assert judge_paid([complete(), other], rows) == []


def test_unequal_sums_are_reported() -> None:
    assert judge_totals("acme", {"ledger": 5, "invoice": 5}) == []
    assert len(judge_totals("acme", {"ledger": 5, "invoice": 5, "credit": 4})) == 1


def test_disconnected_client_is_charged_at_least_what_it_received() -> None:
    left = history(Ending.LEFT)
    left.transcript.add(chunk("one two", [1, 2]))
    assert judge_rows([left], [row(Outcome.CANCELLED, completion_tokens=2)]) == []
    found = judge_rows([left], [row(Outcome.CANCELLED, completion_tokens=1)])
    assert {each.invariant for each in found} == {"one record", "money"}


def test_growth_beyond_its_allowance_is_reported() -> None:
    before = {"open files": 10.0, "serve": 1.0}
    after = {"open files": 12.0, "serve": 1.0, "leak": 3.0}
    found = judge_growth("gateway-1", before, after, {"open files": 2, "leak": 2})
    assert [each.what for each in found] == ["gateway-1: leak went from 0 to 3.0"]


def test_behaviour_without_a_completed_request_is_reported() -> None:
    assert judge_behaviours([history()]) == []
    assert len(judge_behaviours([history(Ending.CUT)])) == 1


def test_seed_determines_the_faults() -> None:
    def first(seed: int) -> list[Any]:
        faults = schedule(seed, list(WEIGHTS))
        return [next(faults) for _ in range(20)]

    assert first(1) == first(1)
    assert first(1) != first(2)
