"""Large work runs outside the event loop, and tenants take turns."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from typing_extensions import override

from gateway.completions.prompt.preparation import prepare
from gateway.completions.prompt.tokenizers import PromptEncoder
from gateway.dialects.request import Prompt
from gateway.http.allowances import BodyBytes
from gateway.http.connection import Stream
from gateway.platform.concurrency import fair_turns
from gateway.platform.concurrency.fair_turns import (
    BURST_SECONDS,
    ROUND_SECONDS,
    FairTurns,
    LoopTurns,
)
from gateway.platform.concurrency.large_work import INLINE_SIZE, LargeWork
from gateway.platform.settings import Settings
from gateway.process.app import create_app, create_operator_app
from gateway.records.errors import InvalidParameterError, OverloadedError, TenantQueueFullError
from tests.gateway.completions.prompt.building import card_of, request_of, tiny_tokenizer
from tests.gateway.http_calls import connection, head, serving
from tests.support.cases import all_cases
from tests.support.patience import PATIENCE_SECONDS

LARGE = INLINE_SIZE + 1
ONE, OTHER = "one", "other"


def turns(places: int = 1, *, most: int = 100, wait_seconds: float = PATIENCE_SECONDS) -> FairTurns:
    """Return slots, which are all free."""
    return FairTurns(places, most_waiting_size=most, wait_seconds=wait_seconds, what="tasks")


class Order:
    """Records the tenants that get slots, and frees slots on request."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns = turns
        self.begun: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, *tenants: str) -> None:
        for tenant in tenants:
            self.tasks.append(asyncio.create_task(self._take(tenant)))
            await asyncio.sleep(0)

    async def _take(self, tenant: str) -> None:
        await self.turns.take(tenant)
        self.begun.append(tenant)

    async def end(self, tenant: str, seconds: float) -> None:
        """End a tenant's task after a time, and let the next one begin."""
        self.turns.give_back(tenant, seconds=seconds)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_tenant_with_the_least_use_is_next() -> None:
    order = Order(turns())
    await order.ask(ONE, ONE, ONE, OTHER, OTHER, OTHER)
    assert order.begun == [ONE]
    await order.end(ONE, 5.0)
    await order.end(OTHER, 1.0)
    await order.end(OTHER, 1.0)
    await order.end(OTHER, 4.0)
    await order.end(ONE, 5.0)
    assert order.begun == [ONE, OTHER, OTHER, OTHER, ONE, ONE]


async def test_idle_tenant_saves_no_time() -> None:
    order = Order(turns())
    await order.ask(OTHER)
    await order.end(OTHER, 0.0)
    for _ in range(10):
        await order.ask(ONE)
        await order.end(ONE, 1.0)
    await order.ask(ONE, OTHER, OTHER, ONE)
    await order.end(ONE, 2.0)
    await order.end(OTHER, 4.0)
    assert order.begun[-3:] == [ONE, OTHER, ONE]


async def test_no_tenant_gets_all_slots() -> None:
    order = Order(turns(3))
    await order.ask(ONE, ONE, ONE)
    assert order.begun == [ONE, ONE]
    await order.ask(OTHER)
    assert order.begun == [ONE, ONE, OTHER]
    await order.end(OTHER, 0.0)
    assert order.begun == [ONE, ONE, OTHER]
    await order.end(ONE, 9.0)
    assert order.begun == [ONE, ONE, OTHER, ONE]


async def test_waiting_tasks_are_bounded_for_each_tenant() -> None:
    places = turns(most=10)
    await places.take(ONE, size=99)
    waiting = [asyncio.create_task(places.take(tenant, size=6)) for tenant in (ONE, OTHER)]
    await asyncio.sleep(0)
    with pytest.raises(TenantQueueFullError, match=r"at most 10\. Given: 6, and 5"):
        await places.take(ONE, size=5)
    waiting.append(asyncio.create_task(places.take(ONE, size=4)))
    for tenant in (ONE, OTHER, ONE):
        await asyncio.sleep(0)
        places.give_back(tenant, seconds=1.0)
    await asyncio.gather(*waiting)


async def test_timed_out_or_cancelled_task_frees_its_slot() -> None:
    hasty = turns(wait_seconds=0.01)
    await hasty.take(ONE)
    with pytest.raises(OverloadedError):
        await hasty.take(OTHER)
    places = turns()
    await places.take(ONE)
    gone = asyncio.create_task(places.take(OTHER))
    await asyncio.sleep(0)
    places.give_back(ONE, seconds=0.0)
    # It has a slot, but has not run since.
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await places.take(ONE)
    gone, next_one = (asyncio.create_task(places.take(OTHER)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    # The slot is free before the cancelled task runs.
    places.give_back(ONE, seconds=0.0)
    with pytest.raises(asyncio.CancelledError):
        await gone
    await next_one


async def test_slots_rest_for_as_long_as_their_tasks_took_but_not_after_a_few_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, rests = [1000.0], list[float]()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: now[0])
    monkeypatch.setattr(loop, "call_later", lambda seconds, _: rests.append(seconds))

    def work(seconds: float) -> list[float]:
        """Return how long the slot rests after a task."""
        rests.clear()
        places._running[ONE] = 1
        now[0] += seconds
        places.give_back(ONE, seconds=seconds)
        now[0] += sum(rests)
        return rests

    places = FairTurns(1, most_waiting_size=9, wait_seconds=None, what="tasks", rests=True)
    places._begin(ONE)
    # The steps of one request.
    assert [work(0.003) for _ in range(3)] == [[]] * 3
    assert sum(work(0.5)) == pytest.approx(0.5 + 3 * 0.003 - BURST_SECONDS)
    assert [sum(work(0.2)) for _ in range(3)] == pytest.approx([0.2] * 3)
    now[0] += 1.0
    assert work(0.009) == []


@pytest.fixture
async def work() -> AsyncIterator[LargeWork]:
    """Threads that end with the test."""
    work = LargeWork(most_waiting_bytes=10**9)
    yield work
    work.close()


@all_cases(("processes", "threads"), [(1, 4), (2, 2), (3, 1), (64, 1)])
def test_processes_of_a_gateway_divide_the_processors(
    monkeypatch: pytest.MonkeyPatch, processes: int, threads: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(8)})
    work = LargeWork(most_waiting_bytes=1, processes=processes)
    assert work._executor._max_workers == threads


async def test_only_large_work_is_done_in_threads(work: LargeWork) -> None:
    main = threading.main_thread()
    small, large = work.of(ONE, size=INLINE_SIZE), work.of(ONE, size=LARGE)
    assert await small(threading.current_thread) is main
    assert await small(threading.current_thread, size=LARGE) is not main
    assert await large(threading.current_thread) is not main


async def test_event_loop_runs_while_a_long_text_is_encoded(work: LargeWork) -> None:
    tokenizer = tiny_tokenizer()
    turns, stop = 0, False

    async def watch() -> None:
        nonlocal turns
        while not stop:
            await asyncio.sleep(0.001)
            turns += 1

    watching = asyncio.create_task(watch())
    card = card_of(tokenizer, context_window=10**6)
    request = request_of("a b c\n" * 100_000)
    result = await prepare(request, tokenizer, card, work.of(ONE, size=LARGE))
    stop = True
    await watching

    assert len(result.prompts[0].token_ids) == 400_000
    # It takes hundreds of milliseconds. A blocked loop would make hardly any turn.
    assert turns > 10


async def test_many_short_prompts_are_large_work(work: LargeWork) -> None:
    tokenizer, threads = tiny_tokenizer(), set[threading.Thread]()

    class Noting(PromptEncoder):
        @override
        def encode(self, prompt: Prompt, **options: Any) -> Sequence[int]:
            threads.add(threading.current_thread())
            return super().encode(prompt, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.completions.prompt.preparation.PromptEncoder", Noting)
        request = request_of(*["a b"] * 1_024)
        prepared = await prepare(request, tokenizer, card_of(tokenizer), work.of(ONE, size=7_000))
    assert len(prepared.prompts) == 1_024
    assert threading.main_thread() not in threads


async def test_error_in_large_work_is_raised_and_frees_its_slot(work: LargeWork) -> None:
    def fail() -> None:
        raise InvalidParameterError("Seen.")

    for _ in range(20):
        with pytest.raises(InvalidParameterError, match="Seen"):
            await work.of(ONE, size=LARGE)(fail)


async def test_work_of_one_tenant_does_not_delay_another(work: LargeWork) -> None:
    may_end = threading.Event()
    ended: list[str] = []

    def waits(tenant: str) -> Callable[[], None]:
        def run() -> None:
            assert may_end.wait(PATIENCE_SECONDS)
            ended.append(tenant)

        return run

    tasks = [asyncio.create_task(work.of(ONE, size=LARGE)(waits(ONE))) for _ in range(20)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(work.of(OTHER, size=LARGE)(waits(OTHER))))
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*tasks)
    # After the tasks that had started, and those that start while these end.
    assert ended.index(OTHER) < 10


async def test_thread_of_a_cancelled_request_keeps_its_slot_until_it_ends(
    work: LargeWork,
) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        begun.release()
        assert may_end.wait(PATIENCE_SECONDS)

    tasks = [asyncio.create_task(work.of(str(i), size=LARGE)(wait)) for i in range(20)]
    assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE_SECONDS)
    tasks[0].cancel()
    may_end.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [None] * 19


async def test_bodies_of_a_client_are_bounded_together() -> None:
    intake = BodyBytes(most_bytes=10)
    with intake.body_of(ONE) as first:
        first(6)
        with intake.body_of(ONE) as second, intake.body_of(OTHER) as others:
            others(10)
            second(4)
            with pytest.raises(TenantQueueFullError, match=r"at most 10 bytes .* Given: 11"):
                first(1)
        first(4)


async def test_bodies_of_all_clients_are_bounded_and_another_one_always_finds_room() -> None:
    intake = BodyBytes(most_bytes=16)
    with ExitStack() as stack:
        adds = [stack.enter_context(intake.body_of(str(number))) for number in range(20)]
        held = 0
        for add in adds:
            size = 0
            with suppress(TenantQueueFullError):
                for _ in range(16):
                    add(1)
                    size += 1
            held += size
            assert size > 0 or held > 60
        assert held <= 64
    with intake.body_of(ONE) as add:
        add(16)


class Requests:
    """Requests that `LoopTurns` runs, and the order of their steps, which advance the clock."""

    def __init__(self) -> None:
        self.turns = LoopTurns()
        self.steps: list[str] = []
        self.now = 0.0

    async def request(self, caller: str, *, steps: int = 1, seconds: float = 0.002) -> None:
        """Run a request whose steps hold the loop."""

        async def work() -> None:
            await self.turns.enter(caller)
            for _ in range(steps):
                self.steps.append(caller)
                self.now += seconds
                await asyncio.sleep(0)

        await self.turns.run(work())

    async def exhaust(self, caller: str) -> None:
        """Use more than a caller's share."""
        await self.request(caller, steps=1, seconds=0.5)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """Nothing but steps advances their clock."""
    requests = Requests()
    monkeypatch.setattr(fair_turns, "time", SimpleNamespace(perf_counter=lambda: requests.now))
    return requests


async def test_long_work_yields_the_loop_between_slices(requests: Requests) -> None:
    order: list[str] = []

    async def work(tenant: str, slices: int) -> None:
        for _ in range(slices):
            async with requests.turns.slice_of(tenant):
                order.append(tenant)
                requests.now += 0.002

    async def watch() -> None:
        while True:
            order.append("loop")
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(work(ONE, 4) for _ in range(5)), work(OTHER, 4))
    watching.cancel()
    # Between two slices the loop served others for longer than a turn.
    between = [len(list(group)) for name, group in itertools.groupby(order) if name == "loop"]
    assert len(between) >= 24
    assert all(rounds > 1 for rounds in between[1:-1])
    # The tenant with one request waits for one slice of the other at a time.
    tenants = [name for name in order if name != "loop"]
    assert tenants[:9].count(OTHER) == 4


async def test_steps_of_a_caller_above_its_share_do_not_delay_others(requests: Requests) -> None:
    await requests.request(OTHER, seconds=0)
    await requests.exhaust(ONE)
    requests.steps.clear()
    many = [asyncio.create_task(requests.request(ONE, steps=3)) for _ in range(20)]
    await asyncio.sleep(0.001)
    await requests.request(OTHER, steps=5, seconds=0)
    before = requests.steps.copy()
    await asyncio.gather(*many)
    # Between two steps of the other caller, at most one of the sixty runs.
    assert before.count(OTHER) == 5
    assert before.count(ONE) <= 10
    assert requests.steps.count(ONE) == 60


async def test_caller_that_has_the_loop_for_itself_waits_for_no_turns(requests: Requests) -> None:
    await requests.exhaust(ONE)
    assert not requests.turns.is_over(ONE)
    await requests.request(OTHER)
    assert requests.turns.is_over(ONE)
    assert not requests.turns.is_over(OTHER)


async def test_callers_within_their_shares_hold_the_loop_for_a_burst_together(
    requests: Requests,
) -> None:
    callers, rounds = [f"caller-{number}" for number in range(10)], list[float]()
    for caller in callers:
        await requests.request(caller, seconds=0.0001)

    async def watch() -> None:
        while True:
            rounds.append(requests.now)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(requests.request(caller) for _ in range(4) for caller in callers))
    watching.cancel()
    assert requests.now - rounds[0] >= 40 * 0.002
    # A burst, the step that exceeds it, and one that took its turn.
    most = fair_turns.BURST_SECONDS + 2 * 0.002
    assert max(after - before for before, after in itertools.pairwise(rounds)) <= most + 1e-6


async def test_requests_that_wait_to_begin_are_bounded_and_others_may_begin(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_turns, "MOST_ENTERING", 100)
    requests.turns = LoopTurns()
    await requests.exhaust(ONE)
    await requests.request(OTHER, seconds=0)
    waiting = [
        asyncio.create_task(requests.request(ONE, steps=3, seconds=ROUND_SECONDS / 5))
        for _ in range(400)
    ]
    await asyncio.sleep(0)
    await requests.request(OTHER, seconds=0)
    assert requests.steps.count(ONE) < 200
    results = await asyncio.gather(*waiting, return_exceptions=True)
    refused = [result for result in results if result is not None]
    # A step of a request that has begun waits too, but it is never refused.
    assert 0 < len(refused) <= 300
    assert all(isinstance(each, TenantQueueFullError) for each in refused)
    assert "at most 100" in str(refused[0])
    assert requests.steps.count(ONE) == 1 + 3 * (400 - len(refused))


async def test_slices_of_a_caller_above_its_share_take_one_turn_each(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    await requests.request(OTHER, seconds=0)
    await requests.exhaust(ONE)

    async def work() -> None:
        await requests.turns.enter(ONE)
        for _ in range(3):
            async with requests.turns.slice_of(ONE):
                with monkeypatch.context() as within:
                    within.setattr(requests.turns._steps, "_start", None)  # It needs no other turn.
                    await asyncio.sleep(0.001)

    async with asyncio.timeout(PATIENCE_SECONDS):
        await requests.turns.run(work())


async def test_parts_of_a_stream_are_steps_of_its_request_until_the_client_leaves() -> None:
    own, makers, left = set[Any](), set[Any](), asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        while True:
            makers.add(asyncio.current_task())
            await asyncio.sleep(0)
            yield b"part"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        own.add(asyncio.current_task())
        await Stream(parts())(scope, receive, send)
        left.set()

    async with serving(app) as url:
        async with connection(url) as (reader, writer):
            writer.write(head("key"))
            await reader.readuntil(b"part")
        await asyncio.wait_for(left.wait(), PATIENCE_SECONDS)
    assert makers == own


def test_no_route_calls_a_dependency_in_a_thread() -> None:
    def calls(dependant: Dependant) -> Iterator[Any]:
        yield dependant.call
        for each in dependant.dependencies:
            yield from calls(each)

    app = create_app(Settings())
    for route in (*app.routes, *create_operator_app(Settings(), app).routes):
        if isinstance(route, APIRoute):
            threaded = [call for call in calls(route.dependant) if not iscoroutinefunction(call)]
            assert not threaded, route.path


async def test_failures_and_cancellations_reach_the_request_that_waits(requests: Requests) -> None:
    seen: list[str] = []

    async def work(future: asyncio.Future[None]) -> None:
        try:
            await future
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    loop = asyncio.get_running_loop()
    for error in (ValueError(), None):
        future = loop.create_future()
        task = asyncio.create_task(_awaited(requests.turns.run(work(future))))
        await asyncio.sleep(0)
        if error is None:
            task.cancel()
        else:
            future.set_exception(error)
        await asyncio.wait([task])
    assert seen == ["ValueError", "CancelledError"]
    assert task.cancelled()


async def _awaited(request: Awaitable[None]) -> None:
    await request
