"""A killed client: none of its work continues, and Redis holds nothing of it."""

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from contract import keys
from tests.e2e.caller import calling
from tests.e2e.examples import COUNTING, ids_of
from tests.support.deployment import MAX_SEQUENCES
from tests.support.processes import wait_until
from tests.support.stack import MODEL, Stack, metric

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("alone")]

FILLING_TOKENS = 2_000
"""Of completions that would run long after their client was killed."""
LONG_PROMPTS = 48
LONG_PROMPT_TOKENS = 2_000
NEXT_TOKENS = 8

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
one_way = pytest.mark.parametrize(
    "stream", [pytest.param(False, marks=pytest.mark.long), True], ids=["plain", "streamed"]
)
"""For tests of the engine; other tests prove how a gateway detects a disconnect."""


@pytest.fixture(autouse=True)
def idle(stack: Stack, store: "Redis") -> Iterator[None]:
    """Begin and end with an idle engine and an empty queue."""

    def is_over() -> bool:
        return is_idle(stack) and not held(store) and not job_keys(store)

    wait_until(is_over, what="the engine being idle")
    yield
    wait_until(is_over, what="the engine being idle")


def worker_metric(stack: Stack, name: str) -> float:
    """Return one of the worker's metrics."""
    return metric(stack.worker_url(), name)


def is_idle(stack: Stack) -> bool:
    """Whether the worker holds no job and the engine has no sequence."""
    names = ("sluice_worker_jobs_running", "vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(worker_metric(stack, name) for name in names)


def held(store: "Redis") -> list[Any]:
    """Return everything that Redis holds of any job, except receipts that are being settled."""
    active: Any = store.zrange(keys.active_tenants(MODEL), 0, -1)
    leases: Any = store.zrange(keys.leases(MODEL), 0, -1)
    queues = store.scan_iter(f"{keys.queue.prefix(MODEL)}*")
    jobs = [key for key in job_keys(store) if store.hexists(key, "worker")]
    return [*active, *leases, *queues, *jobs, *[b"waiting"] * waiting(store)]


def waiting(store: "Redis") -> int:
    """Return the number of waiting jobs."""
    depth: Any = store.get(keys.waiting(MODEL))
    return int(depth or 0)


def completion_tokens(stack: Stack) -> int:
    """Return the tokens that the engine has generated for all clients."""
    return int(worker_metric(stack, "sluice_worker_completion_tokens_total"))


def wait_until_nothing_is_left(stack: Stack, store: "Redis") -> None:
    """Wait until neither the worker nor Redis holds anything of a killed client."""
    wait_until(lambda: is_idle(stack) and not held(store), what="the end of the requests")


def check_stays_idle(stack: Stack) -> None:
    """The engine's next steps generate tokens only for the next client: its gauges lag a step."""
    before = completion_tokens(stack)
    with calling(stack.url, stack.key("next"), prompt=COUNTING, max_tokens=NEXT_TOKENS):
        wait_until(
            lambda: completion_tokens(stack) >= before + NEXT_TOKENS and is_idle(stack),
            what="the next answer's end",
        )
    assert completion_tokens(stack) == before + NEXT_TOKENS


@both_ways
def test_job_of_a_client_killed_in_the_queue_never_runs(
    stack: Stack, store: "Redis", stream: bool
) -> None:
    filler = {"n": MAX_SEQUENCES, "max_tokens": FILLING_TOKENS, "ignore_eos": True, "stream": True}
    as_large = {"n": MAX_SEQUENCES, "max_tokens": 5}  # A small job would preempt a large one.
    before = completion_tokens(stack)
    with calling(stack.url, stack.key("crowd"), prompt=COUNTING, **filler) as crowd:
        wait_until(lambda: is_full(stack), what="the engine being full")
        [first, *_] = jobs = job_keys(store)
        claimed = worker_metric(stack, "sluice_worker_jobs_claimed_total")
        with calling(
            stack.gateways[1], stack.key("crowd"), prompt=COUNTING, stream=stream, **as_large
        ) as caller:
            wait_until(lambda: waiting(store) == 1, what="a job waiting")
            answer = caller.kill()
            wait_until(
                lambda: waiting(store) == 0 and job_keys(store) == jobs,
                what="the job of the killed client being gone",
            )

        assert is_full(stack), "the job is gone before there was room for it"
        assert answer == b""
        assert first.startswith(keys.job.prefix(MODEL).encode())
        assert store.zrange(keys.active_tenants(MODEL), 0, -1) == []
        crowd.kill()
        wait_until_nothing_is_left(stack, store)

    generated = completion_tokens(stack) - before
    assert generated < MAX_SEQUENCES * FILLING_TOKENS, "it did not end by itself"
    assert worker_metric(stack, "sluice_worker_jobs_claimed_total") == claimed
    check_stays_idle(stack)


def is_full(stack: Stack) -> bool:
    """Whether the engine has as many sequences as it can run."""
    return worker_metric(stack, "vllm:num_requests_running") == MAX_SEQUENCES


def job_keys(store: "Redis") -> list[bytes]:
    """Return the keys of all jobs, waiting, leased or ended."""
    return sorted(store.scan_iter(f"{keys.job.prefix(MODEL)}*"))


@pytest.mark.slow
@one_way
def test_client_killed_during_prefill_stops_the_engine(
    stack: Stack, store: "Redis", stream: bool
) -> None:
    # Each prompt begins differently, so that none is in the prefix cache.
    filling = ids_of(COUNTING) * LONG_PROMPT_TOKENS
    first = 300 + LONG_PROMPTS * stream
    prompts = [[first + i, *filling[: LONG_PROMPT_TOKENS - 1]] for i in range(LONG_PROMPTS)]
    before = completion_tokens(stack)
    with calling(
        stack.url, stack.key("reader"), prompt=prompts, max_tokens=1, stream=stream
    ) as caller:
        wait_until(
            lambda: worker_metric(stack, "sluice_worker_jobs_running") > 0,
            what="a job being claimed",
        )
        caller.kill()
        wait_until_nothing_is_left(stack, store)

    generated = completion_tokens(stack) - before
    assert generated < LONG_PROMPTS, "every prompt that is read gives one token"
    check_stays_idle(stack)


@both_ways
def test_client_killed_between_tokens_stops_the_engine(
    stack: Stack, store: "Redis", stream: bool
) -> None:
    options = {"n": 8, "max_tokens": FILLING_TOKENS, "ignore_eos": True, "stream": stream}
    before = completion_tokens(stack)
    with calling(stack.url, stack.key("writer"), prompt=COUNTING, **options) as caller:
        if stream:
            events = caller.read_events(40)
            assert {event["choices"][0]["index"] for event in events} == set(range(8))
        wait_until(
            lambda: completion_tokens(stack) > before + 100,
            what="tokens being generated",
        )
        assert worker_metric(stack, "vllm:num_requests_running") == 8
        caller.kill()
        wait_until_nothing_is_left(stack, store)

    assert completion_tokens(stack) - before < 8 * FILLING_TOKENS, "it did not end by itself"
    check_stays_idle(stack)
