"""Each attempt of a resumed job has its own spans, linked to the previous attempt."""

import json
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.stack import MODEL, Stack, metric, running_stack
from tests.telemetry.traces.client import PROMPT, client_trace, start_scripted_worker
from tests.telemetry.traces.collector import Collector, Span

LEASE_SECONDS = 60.0
"""Tests expire leases; a worker that waits for CPU time does not lose them."""
TOKENS = 60
MOST_STREAMS = 5
WORKERS = ("worker-1", "worker-2")
RESUMED = "sluice_gateway_resumed_jobs_total"
SESSION_HEADER, SESSION = "x-claude-code-session-id", "5f2c-a"


@pytest.fixture(scope="module")
def stack(collector: Collector) -> Iterator[Stack]:
    """A gateway and two slow workers, which hand back their jobs at once on SIGTERM."""
    with running_stack() as stack:
        stack.start_gateway(**collector.environment, SLUICE_LOG_FORMAT="json")
        for name in WORKERS:
            start_worker(stack, collector, name)
        yield stack


class Reported(NamedTuple):
    """A stream that was read."""

    trace_id: str
    first: str
    """The worker that stopped."""
    second: str
    """The worker that resumed the stream."""


@pytest.fixture(scope="module")
def killed(stack: Stack, collector: Collector) -> Reported:
    """A stream whose worker was killed, and restarted after the stream's end."""
    reported = stream_over_an_end(stack, collector, is_killed=True)
    start_worker(stack, collector, reported.first)
    return reported


def start_worker(stack: Stack, collector: Collector, name: str) -> None:
    start_scripted_worker(
        stack,
        name,
        SLUICE_WORKER_ID=name,
        SLUICE_SCRIPTED_STEP_SECONDS="0.03",
        SLUICE_LEASE_SECONDS=str(LEASE_SECONDS),
        SLUICE_DRAIN_SECONDS="0",
        SLUICE_LOG_FORMAT="json",
        **collector.environment,
    )


def stream_over_an_end(stack: Stack, collector: Collector, *, is_killed: bool) -> Reported:
    """Read a stream whose worker stops after the stream has begun."""
    # On a busy machine a stream may end before its worker is found or has stopped, or be resumed
    # more than once.
    for _ in range(MOST_STREAMS):
        before = metric(stack.operators, RESUMED)
        trace_id, first = _end_a_worker(stack, is_killed=is_killed)
        if metric(stack.operators, RESUMED) == before + 1:
            return Reported(trace_id, first, *{*WORKERS} - {first})
        if first:
            start_worker(stack, collector, first)
    pytest.fail(f"none of {MOST_STREAMS} streams resumed on another worker")


def _end_a_worker(stack: Stack, *, is_killed: bool) -> tuple[str, str]:
    """Read a stream and stop its worker; return its trace and the worker, None if none ran it."""
    trace_id, _, header = client_trace()
    first, has_begun = "", False
    with httpx.stream(
        "POST",
        f"{stack.url}/v1/completions",
        headers={"authorization": f"Bearer {stack.key()}", SESSION_HEADER: SESSION, **header},
        json={"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True},
        timeout=PROCESS_PATIENCE_SECONDS,
    ) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            assert "error" not in json.loads(line.removeprefix("data: ")), line
            if not has_begun:
                has_begun = True
                first = next((name for name in WORKERS if is_running_a_job(stack, name)), "")
                if first and is_killed:
                    stack.kill(first)
                elif first:
                    stack.stop(first)
    return trace_id, first


def is_running_a_job(stack: Stack, worker: str) -> bool:
    return metric(stack.worker_url(worker), "sluice_worker_jobs_running") == 1


def split(trace: list[Span], name: str) -> list[Span]:
    return sorted(
        (span for span in trace if span.name == name),
        key=lambda span: int(span.attributes["sluice.attempt"]),
    )


def test_attempt_after_a_killed_worker_is_linked_to_the_lost_one(
    killed: Reported, collector: Collector
) -> None:
    trace_id, _, second = killed
    trace = collector.wait_for(
        trace_id, "POST /v1/completions", "attempt", "attempt", "generate", "decode", "settle"
    )
    [request] = [span for span in trace if span.name == "POST /v1/completions"]
    lost, resumed = split(trace, "attempt")
    assert lost.parent_id == resumed.parent_id == request.span_id
    assert (lost.links, resumed.links) == ([], [(trace_id, lost.span_id)])
    assert lost.is_error
    assert lost.attributes["error.type"] == lost.attributes["sluice.outcome"] == "lease_expired"
    assert not resumed.is_error
    assert (lost.attributes["sluice.attempt"], resumed.attributes["sluice.attempt"]) == (1, 2)
    # The killed worker's spans were lost with it.
    [generate] = split(trace, "generate")
    assert generate.parent_id == resumed.span_id
    assert generate.links == [(trace_id, lost.span_id)]
    assert generate.attributes["sluice.worker.id"] == second
    assert generate.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert lost.end <= resumed.start <= generate.start
    assert not request.is_error
    assert request.attributes["gen_ai.usage.output_tokens"] == TOKENS


@pytest.mark.usefixtures("killed")
def test_both_attempts_around_a_stopped_worker_have_its_spans(
    stack: Stack, collector: Collector
) -> None:
    trace_id, first, second = stream_over_an_end(stack, collector, is_killed=False)
    trace = collector.wait_for(
        trace_id, "POST /v1/completions", "attempt", "attempt", "generate", "generate", "settle"
    )
    attempts, generates = split(trace, "attempt"), split(trace, "generate")
    assert [span.parent_id for span in generates] == [span.span_id for span in attempts]
    assert [span.attributes["sluice.worker.id"] for span in generates] == [first, second]
    assert [span.attributes["sluice.outcome"] for span in generates] == ["handed_back", "finished"]
    assert [span.links for span in generates] == [[], [(trace_id, attempts[0].span_id)]]
    assert len([span for span in trace if span.name == "queue"]) == 2


def test_line_about_a_lost_attempt_names_trace_request_session_and_job(
    stack: Stack, killed: Reported
) -> None:
    lines = [json.loads(line) for line in stack.log("gateway").splitlines()]
    [line] = [
        line
        for line in lines
        if "is over: lease_expired" in line["message"] and line["trace_id"] == killed.trace_id
    ]
    assert line["request_id"].startswith("req_")
    assert line["session_id"] == SESSION
    assert line["job_id"].startswith("cmpl-")
    assert line["level"] == "INFO"
