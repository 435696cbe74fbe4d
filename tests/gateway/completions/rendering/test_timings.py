"""Conflict 20: the times of a request in five formats."""

import json
from typing import Any

import pytest

from contract.dialect import Dialect
from gateway.completions.rendering.assembler import WholeResponse
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.form_registry import collect
from gateway.completions.rendering.sse import ChunkRenderer
from gateway.completions.rendering.timings import Stopwatch
from tests.gateway.replies import STOP, completion, ended, inbox, said
from tests.support.cases import all_cases
from tests.support.events import parse_chunks

REPLIES = [
    said("a"),
    said("b", finish=STOP),
    ended(prompt_tokens=40, tokens=21, cached=30, prefill_ms=20.0, generation_ms=100.0),
]
"""Ended 150 ms after its start: 30 ms in the queue, 20 ms of prefill, 100 ms of generation."""

FIREWORKS_METRICS = {
    "prompt-tokens": 40,
    "cached-prompt-tokens": 30,
    "server-time-to-first-token": 0.05,
    "server-processing-time": 0.15,
    "prefill-queue-duration": 0.03,
    "prefill-duration": 0.02,
    "generation-duration": 0.1,
}
LLAMACPP_TIMINGS = {
    "cache_n": 30,
    "prompt_n": 10,
    "prompt_ms": 20.0,
    "prompt_per_token_ms": 2.0,
    "prompt_per_second": 500.0,
    "predicted_n": 21,
    "predicted_ms": 100.0,
    "predicted_per_token_ms": 4.762,
    "predicted_per_second": 210.0,
}
VLLM_METRICS = {
    "time_to_first_token_ms": 50.0,
    "generation_time_ms": 100.0,
    "queue_time_ms": 30.0,
    "mean_itl_ms": 5.0,
    "tokens_per_second": 210.0,
    "speculative_decoding": None,
}
OMLX_USAGE = {
    "cached_tokens": 30,
    "model_load_duration": 0.0,
    "time_to_first_token": 0.05,
    "total_time": 0.15,
    "prompt_eval_duration": 0.02,
    "generation_duration": 0.1,
    "prompt_tokens_per_second": 2000.0,
    "generation_tokens_per_second": 210.0,
}
MISTRALRS_USAGE = {
    "avg_tok_per_sec": 508.333,
    "avg_prompt_tok_per_sec": 2000.0,
    "avg_compl_tok_per_sec": 210.0,
    "total_time_sec": 0.15,
    "total_prompt_time_sec": 0.02,
    "total_completion_time_sec": 0.1,
}
TOKENS = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 150 ms pass between the start of every request, at 0, and its first reply."""
    monkeypatch.setattr(f"{Stopwatch.__module__}.monotonic", lambda: 0.15)


def asking(dialect: Dialect, **fields: Any) -> Completion:
    """Make the fixed part of a response whose request began at time 0."""
    return completion(dialect=dialect, started_at=0.0, **fields)


async def whole(answer: Completion) -> tuple[dict[str, Any], WholeResponse]:
    """Return the whole response and its body."""
    collected = await collect(answer, inbox(*REPLIES))
    return json.loads(collected.content), collected


def streamed(answer: Completion) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    return parse_chunks(ChunkRenderer(answer).render(REPLIES))


def times(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a usage object beside OpenAI's counts."""
    return {name: value for name, value in usage.items() if name not in TOKENS}


@all_cases(
    ("dialect", "members", "in_usage"),
    [
        (Dialect.OPENAI, {}, {}),
        (Dialect.FIREWORKS, {}, {}),
        (Dialect.FIREWORKS_2026, {}, {}),
        (Dialect.LLAMACPP, {"timings": LLAMACPP_TIMINGS}, {}),
        (Dialect.LLAMACPP_2026, {"timings": LLAMACPP_TIMINGS}, {}),
        (Dialect.MISTRALRS, {}, MISTRALRS_USAGE),
        (Dialect.OMLX, {}, OMLX_USAGE),
        (Dialect.VLLM, {}, {}),
    ],
)
async def test_conflict_20_times_have_the_format_of_the_dialect(
    dialect: Dialect, members: dict[str, Any], in_usage: dict[str, Any]
) -> None:
    body, _ = await whole(asking(dialect))
    *others, final = streamed(asking(dialect))
    for reported in (body, final):
        assert {
            name: reported[name]
            for name in ("timings", "perf_metrics", "metrics")
            if name in reported
        } == members
        assert times(reported["usage"]) == in_usage
    assert all("timings" not in chunk for chunk in others)


@all_cases(
    ("dialect", "name", "expected"),
    [
        (Dialect.FIREWORKS, "perf_metrics", FIREWORKS_METRICS),
        (Dialect.OPENAI, "perf_metrics", FIREWORKS_METRICS),
        (Dialect.LLAMACPP, "perf_metrics", FIREWORKS_METRICS),
        (Dialect.VLLM, "metrics", VLLM_METRICS),
    ],
)
async def test_conflict_20_requested_times_are_in_body_and_final_chunk(
    dialect: Dialect, name: str, expected: dict[str, Any]
) -> None:
    body, _ = await whole(asking(dialect, wants_timings=True))
    *others, final = streamed(asking(dialect, wants_timings=True))
    assert body[name] == expected
    assert final[name] == expected
    assert all(name not in chunk for chunk in others)


@all_cases("dialect", Dialect)
async def test_conflict_20_only_fireworks_returns_times_in_headers(
    dialect: Dialect,
) -> None:
    _, answer = await whole(asking(dialect))
    if dialect not in (Dialect.FIREWORKS, Dialect.FIREWORKS_2026):
        assert answer.headers == {}
        return
    assert answer.headers == {
        "fireworks-prompt-tokens": "40",
        "fireworks-cached-prompt-tokens": "30",
        "fireworks-server-time-to-first-token": "0.050000",
        "fireworks-server-processing-time": "0.150000",
        "fireworks-prefill-queue-duration": "0.030000",
        "fireworks-prefill-duration": "0.020000",
        "fireworks-generation-duration": "0.100000",
    }


def test_vllm_has_no_metrics_for_several_sequences() -> None:
    renderer = ChunkRenderer(asking(Dialect.VLLM, wants_timings=True, n=2))
    replies = [said("a", finish=STOP), said("b", choice=1, finish=STOP), ended()]
    assert all("metrics" not in chunk for chunk in parse_chunks(renderer.render(replies)))


@pytest.mark.parametrize("dialect", [Dialect.LLAMACPP, Dialect.OPENAI])
def test_timings_per_token_are_in_every_chunk(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = ChunkRenderer(asking(dialect, timings_per_token=True, include_usage=True))
    events = b""
    for now, reply in zip(
        (0.05, 0.07, 0.09, 0.15, 0.15),
        [said("a"), said("b", token_ids=[1, 2]), said("", token_ids=[]), *REPLIES[1:]],
        strict=True,
    ):
        monkeypatch.setattr(f"{Stopwatch.__module__}.monotonic", lambda now=now: now)
        events += renderer.render([reply])
    first, second, final, extra = parse_chunks(events)
    assert first["timings"] == {
        "prompt_n": 3,
        "prompt_ms": 50.0,
        "prompt_per_token_ms": 16.667,
        "prompt_per_second": 60.0,
        "predicted_n": 1,
        "predicted_ms": 0.0,
        "predicted_per_token_ms": 0.0,
        "predicted_per_second": 0.0,
    }
    assert (second["timings"]["predicted_n"], second["timings"]["predicted_ms"]) == (3, 20.0)
    assert final["timings"] == extra["timings"] == LLAMACPP_TIMINGS


async def test_several_prompts_report_sums_of_tokens_and_the_longest_times() -> None:
    replies = [
        said("a", finish=STOP),
        ended(prompt_tokens=10, tokens=4, cached=2, prefill_ms=30.0, generation_ms=10.0),
        said("b", prompt=1, finish=STOP),
        ended(prompt=1, prompt_tokens=20, tokens=6, prefill_ms=5.0, generation_ms=50.0),
    ]
    answer = completion(dialect=Dialect.LLAMACPP, prompts=2, started_at=0.0)
    body = json.loads((await collect(answer, inbox(*replies))).content)
    reported = body["timings"]
    assert (reported["cache_n"], reported["prompt_n"], reported["predicted_n"]) == (2, 28, 10)
    assert (reported["prompt_ms"], reported["predicted_ms"]) == (30.0, 50.0)


async def test_rates_without_tokens_are_zero_and_not_infinite() -> None:
    answer = completion(dialect=Dialect.LLAMACPP, started_at=1.0)
    body = json.loads(
        (
            await collect(
                answer,
                inbox(
                    said("", finish=STOP, token_ids=[]), ended(prompt_tokens=3, tokens=0, cached=3)
                ),
            )
        ).content
    )
    assert set(body["timings"].values()) == {0, 3}
