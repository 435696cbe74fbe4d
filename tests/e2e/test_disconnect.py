"""A killed client: nothing runs for it any more, and Redis holds nothing of it."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from contract import keys
from tests.e2e.caller import calling
from tests.e2e.conftest import MAX_SEQUENCES
from tests.e2e.examples import COUNTING, ids_of
from tests.support.patience import crowded
from tests.support.processes import wait_until
from tests.support.stack import MODEL, Stack, metric

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG_PROMPTS = 24
LONG_PROMPT_TOKENS = 2_000

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])


@pytest.fixture(autouse=True)
def idle(stack: Stack, store: "Redis") -> Iterator[None]:
    """Begin and end with an engine that runs nothing and a queue that holds nothing."""

    def is_over() -> bool:
        return is_idle(stack) and not held(store) and not job_keys(store)

    wait_until(is_over, seconds=30, what="the engine being idle")
    yield
    wait_until(is_over, seconds=30, what="the engine being idle")


def worker_metric(stack: Stack, name: str) -> float:
    """Return one of the worker's metrics."""
    return metric(stack.worker_url(), name)


def is_idle(stack: Stack) -> bool:
    """Whether the worker holds no job and the engine samples and reads nothing."""
    names = ("sluice_worker_jobs_running", "vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(worker_metric(stack, name) for name in names)


def held(store: "Redis") -> list[Any]:
    """Return everything that Redis holds of any job, apart from receipts that are being settled."""
    active: Any = store.zrange(keys.active_tenants(MODEL), 0, -1)
    leases: Any = store.zrange(keys.leases(MODEL), 0, -1)
    queues = store.scan_iter(f"{keys.queue_prefix(MODEL)}*")
    jobs = [key for key in job_keys(store) if store.hexists(key, "worker")]
    return [*active, *leases, *queues, *jobs, *[b"waiting"] * waiting(store)]


def waiting(store: "Redis") -> int:
    """Return the number of jobs that wait in the queue."""
    depth: Any = store.get(keys.waiting(MODEL))
    return int(depth or 0)


def seconds_until(condition: Callable[[], bool], *, since: float, phase: str) -> float:
    """Wait until something holds, and print how long that took."""
    wait_until(condition, seconds=10, what=f"the end of a client killed {phase}")
    seconds = time.monotonic() - since
    print(f"killed {phase}: nothing left after {seconds:.3f} s")  # noqa: T201  (a figure for whoever runs pytest with -rP)
    return seconds


def check_stays_idle(stack: Stack, *, since: float) -> None:
    """Once the second is over, no step may bring a token: the engine's gauges alone lag a step behind."""
    time.sleep(max(since + 1 - time.monotonic(), 0))
    tokens = worker_metric(stack, "sluice_worker_completion_tokens_total")
    time.sleep(0.3)
    assert worker_metric(stack, "sluice_worker_completion_tokens_total") == tokens
    assert is_idle(stack)


@both_ways
def test_client_killed_in_the_queue_is_never_run(
    stack: Stack, store: "Redis", stream: bool
) -> None:
    filler = {"n": MAX_SEQUENCES, "max_tokens": 2_000, "ignore_eos": True, "stream": True}
    with calling(stack.url, stack.key("crowd"), prompt=COUNTING, **filler) as crowd:
        wait_until(
            lambda: worker_metric(stack, "vllm:num_requests_running") == MAX_SEQUENCES,
            seconds=30,
            what="the engine being full",
        )
        [first, *_] = jobs = job_keys(store)
        claimed = worker_metric(stack, "sluice_worker_jobs_claimed_total")
        with calling(
            stack.gateways[1], stack.key("waiter"), prompt=COUNTING, max_tokens=5, stream=stream
        ) as caller:
            wait_until(lambda: waiting(store) == 1, seconds=10, what="a job waiting")
            killed_at, answer = caller.kill()
            seconds = seconds_until(
                lambda: waiting(store) == 0 and job_keys(store) == jobs,
                since=killed_at,
                phase="in the queue",
            )

        assert seconds < crowded(1)
        assert answer == b""
        assert first.startswith(keys.job_prefix(MODEL).encode())
        assert store.zrange(keys.active_tenants(MODEL), 0, -1) == []
        killed_at, _ = crowd.kill()
        seconds = seconds_until(
            lambda: is_idle(stack), since=killed_at, phase=f"with {MAX_SEQUENCES} sequences"
        )

    assert seconds < crowded(1)
    assert held(store) == []
    assert worker_metric(stack, "sluice_worker_jobs_claimed_total") == claimed


def job_keys(store: "Redis") -> list[bytes]:
    """Return the keys of all jobs, waiting, leased or ended."""
    return sorted(store.scan_iter(f"{keys.job_prefix(MODEL)}*"))


@both_ways
def test_client_killed_during_prefill_stops_the_engine(
    stack: Stack, store: "Redis", stream: bool
) -> None:
    # Each prompt begins differently, so that none is found in the prefix cache.
    filling = ids_of(COUNTING) * LONG_PROMPT_TOKENS
    first = 300 + LONG_PROMPTS * stream
    prompts = [[first + i, *filling[: LONG_PROMPT_TOKENS - 1]] for i in range(LONG_PROMPTS)]
    generated = worker_metric(stack, "sluice_worker_completion_tokens_total")
    with calling(
        stack.url, stack.key("reader"), prompt=prompts, max_tokens=1, stream=stream
    ) as caller:
        wait_until(
            lambda: worker_metric(stack, "sluice_worker_jobs_running") > 0,
            seconds=10,
            what="a job being claimed",
        )
        killed_at, _ = caller.kill()
        seconds = seconds_until(
            lambda: is_idle(stack) and not held(store), since=killed_at, phase="during prefill"
        )

    assert seconds < crowded(1)
    generated = worker_metric(stack, "sluice_worker_completion_tokens_total") - generated
    assert generated < LONG_PROMPTS, "every prompt that is read gives one token"
    check_stays_idle(stack, since=killed_at)


@both_ways
def test_client_killed_between_tokens_stops_the_engine(
    stack: Stack, store: "Redis", stream: bool
) -> None:
    options = {"n": 8, "max_tokens": 2_000, "ignore_eos": True, "stream": stream}
    before = worker_metric(stack, "sluice_worker_completion_tokens_total")
    with calling(stack.url, stack.key("writer"), prompt=COUNTING, **options) as caller:
        if stream:
            events = caller.read_events(40)
            assert {event["choices"][0]["index"] for event in events} == set(range(8))
        wait_until(
            lambda: worker_metric(stack, "sluice_worker_completion_tokens_total") > before + 100,
            seconds=20,
            what="tokens being generated",
        )
        assert worker_metric(stack, "vllm:num_requests_running") == 8
        killed_at, _ = caller.kill()
        seconds = seconds_until(
            lambda: is_idle(stack) and not held(store), since=killed_at, phase="between tokens"
        )

    generated = worker_metric(stack, "sluice_worker_completion_tokens_total")
    assert seconds < crowded(1)
    assert generated - before < 8 * 2_000, "it did not end by itself"
    check_stays_idle(stack, since=killed_at)
