"""Fair scheduling of processor time between tenants, by the time that each has used."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from types import coroutine
from typing import Any, Final, NamedTuple, TypeVar

from gateway.records.errors import OverloadedError, TenantQueueFullError

RETRY_AFTER_SECONDS: Final = 1.0
MOST_TENANTS: Final = 1_000
"""Tenants whose used time is stored. Beyond them, idle tenants that used no more than others are
dropped."""
SHARE: Final = 0.5
"""Part of the event loop's time that a caller may use without waiting for turns."""
BURST_SECONDS: Final = 0.01
"""How much loop time a caller may use at once, all callers in one round, and tasks without rests.
"""
MOST_DEBT_SECONDS: Final = 0.4
"""The most that a caller's used time exceeds its share by, so that it is over for 0.8 s at most."""
ROUND_SECONDS: Final = 0.0005
"""How much time all callers above their share use in one round of the event loop."""
MOST_STEPS: Final = 32
"""Steps that wait and are started together in one round, if they are short."""
LONG_SECONDS: Final = 0.001
"""Work that took longer is followed by a rest of as much time, if others use the loop too."""
SHARED_SECONDS: Final = 1.0
"""How long after the use by another caller the loop counts as shared."""
MOST_ENTERING: Final = 10_000
"""Requests of one caller that may wait for their first turn."""

ROWS_OF_SLICE: Final = 250
"""Rows of a table that a slice writes as JSON or CSV."""

T = TypeVar("T")
R = TypeVar("R")


class _Waiting(NamedTuple):
    is_granted: asyncio.Future[None]
    size: int


class FairTurns:
    """A fixed number of slots. The waiting tenant that has used the least time runs next.

    With several slots, no tenant gets all of them, so that another tenant never waits for its work.
    An idle tenant accumulates no credit.
    """

    def __init__(
        self,
        places: int,
        *,
        most_waiting_size: int,
        wait_seconds: float | None,
        what: str,
        rests: bool = False,
    ) -> None:
        """Start with all slots free.

        Args:
            places: Maximum number of concurrent tasks.
            most_waiting_size: Maximum total size of one tenant's waiting tasks.
            wait_seconds: How long a task may wait; None for no limit.
            what: Name of the tasks in error messages.
            rests: Whether slots stay empty for as long as their tasks took, once these took more
                than BURST_SECONDS. Use this for work that leaves the event loop little time.
        """
        self._places = self._free = places
        self._most_waiting_size = most_waiting_size
        self._wait_seconds = wait_seconds
        self._what = what
        self._rests = rests
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._waiting_size: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        self._floor = 0.0
        """Used time of the tenant that ran last. New tenants start with it."""
        self._rested_at = 0.0
        """When the slots have been empty for as long as their tasks took."""

    async def take(self, tenant_id: str, *, size: int = 1, is_next: bool = False) -> None:
        """Wait for a slot; if it `is_next`, before the tenant's other tasks. Give it back.

        Raises TenantQueueFullError if too much work of this tenant is already waiting, and
        OverloadedError if no slot becomes free in time.
        """
        if tenant_id not in self._running and tenant_id not in self._waiting:
            self._begin(tenant_id)
        if self._free > 0 and not self._waiting and self._may_run(tenant_id):
            self._start(tenant_id)
            return
        held = self._waiting_size[tenant_id]
        if held and held + size > self._most_waiting_size:
            raise TenantQueueFullError(
                f"The total size of your waiting {self._what} must be at most "
                f"{self._most_waiting_size}. Given: {held}, and {size} of this one.",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        waiting = _Waiting(asyncio.get_running_loop().create_future(), size)
        await self._wait(tenant_id, waiting, is_next=is_next)

    def give_back(self, tenant_id: str, *, seconds: float) -> None:
        """Free a slot whose work took this much processor time."""
        self._used[tenant_id] += seconds
        self._running[tenant_id] -= 1
        if not self._running[tenant_id]:
            del self._running[tenant_id]
        loop, rest = asyncio.get_running_loop(), 0.0
        if self._rests:
            now = loop.time()
            # Twice the time: as much of it passes while a task runs as when the slot rests.
            began = max(self._rested_at, now - seconds)
            self._rested_at = began + 2 * seconds / self._places
            rest = self._rested_at - now - BURST_SECONDS
        if rest > 0:
            loop.call_later(rest, self._free_slot)
        else:
            self._free_slot()

    def _free_slot(self) -> None:
        self._free += 1
        self._grant()

    def set_places(self, places: int) -> None:
        """Change the number of slots. Tasks that run keep theirs."""
        self._free += places - self._places
        self._places = places
        self._grant()

    async def _wait(self, tenant_id: str, waiting: _Waiting, *, is_next: bool) -> None:
        queue = self._waiting.setdefault(tenant_id, deque())
        (queue.appendleft if is_next else queue.append)(waiting)
        self._waiting_size[tenant_id] += waiting.size
        self._grant()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiting.is_granted
        except BaseException as error:
            if waiting.is_granted.done() and not waiting.is_granted.cancelled():
                self.give_back(tenant_id, seconds=0.0)
            else:
                self._take_out(tenant_id, waiting)
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"Too many {self._what} are waiting.",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                ) from None
            raise

    def _grant(self) -> None:
        while self._waiting and self._free > 0:
            tenants = [tenant for tenant in self._waiting if self._may_run(tenant)]
            if not tenants:
                return
            tenant = min(tenants, key=self._used.__getitem__)
            waiting = self._waiting[tenant][0]
            self._take_out(tenant, waiting)
            if waiting.is_granted.cancelled():
                continue  # Its task is being cancelled.
            self._start(tenant)
            waiting.is_granted.set_result(None)

    def _take_out(self, tenant_id: str, waiting: _Waiting) -> None:
        queue = self._waiting.get(tenant_id)
        if queue is None or waiting not in queue:
            return
        queue.remove(waiting)
        self._waiting_size[tenant_id] -= waiting.size
        if not queue:
            del self._waiting[tenant_id], self._waiting_size[tenant_id]

    def _may_run(self, tenant_id: str) -> bool:
        return self._running[tenant_id] < max(1, self._places - 1)

    def _start(self, tenant_id: str) -> None:
        self._free -= 1
        self._running[tenant_id] += 1
        self._floor = max(self._floor, self._used[tenant_id])

    def _begin(self, tenant_id: str) -> None:
        if len(self._used) > MOST_TENANTS:
            self._used = {
                tenant: used
                for tenant, used in self._used.items()
                if used > self._floor or tenant in self._running or tenant in self._waiting
            }
        self._used[tenant_id] = max(self._used.get(tenant_id, 0.0), self._floor)


class LoopAccount:
    """The loop time that a caller has used, which drains at its share of the time that passes."""

    __slots__ = ("_grace", "_share", "caller", "drained_at")

    def __init__(
        self, caller: str, *, burst_seconds: float = BURST_SECONDS, share: float = SHARE
    ) -> None:
        """Start without use; `burst_seconds` may be used at once."""
        self.caller = caller
        self.drained_at = 0.0
        """When the account is empty, on the clock of `time.perf_counter`."""
        self._share = share
        self._grace = burst_seconds / share

    def charge(self, seconds: float, now: float) -> None:
        """Add loop time that the caller used until `now`."""
        drained_at = max(self.drained_at, now) + seconds / self._share
        self.drained_at = min(drained_at, now + MOST_DEBT_SECONDS / SHARE)

    def is_over(self, now: float) -> bool:
        """Whether the caller has used more than its share."""
        return self.drained_at > now + self._grace


class _Turn:
    """One request, while its steps run."""

    __slots__ = ("account", "has_slice", "is_entering", "is_known")

    def __init__(self, account: LoopAccount) -> None:
        self.account = account
        self.is_entering = False
        self.is_known = False
        """Whether the request is authenticated."""
        self.has_slice = False
        """Whether its code has a slice or waits for one."""


class LoopTurns:
    """Divides the event loop's time between callers: tenants, and networks before authentication.

    `run` measures each step of a request, which lasts until the request next waits. While others
    use the loop too, all callers that have used more than `SHARE` of it may together use
    `ROUND_SECONDS` in each round of the event loop. Their further steps wait for later rounds, and
    the caller that has used the least is next. A round serves everything else too.

    Many callers within their shares may come at once. Once all steps without turns have used
    BURST_SECONDS in a round, its other steps take turns, too.

    Long work takes its turns itself, in slices of about a millisecond. While others use the loop,
    it rests after each longer slice or step, for as long as the slice or step took.
    """

    def __init__(self) -> None:
        self._steps = FairTurns(
            MOST_STEPS, most_waiting_size=MOST_ENTERING, wait_seconds=None, what="requests"
        )
        self._slices = FairTurns(1, most_waiting_size=0, wait_seconds=None, what="slices")
        self._spent = 0.0
        """Time used by turns in this round."""
        self._free_spent = 0.0
        """Time used by steps without turns in this round of the event loop."""
        self._rest = 0.0
        """How long to rest after this round."""
        self._step_seconds = 0.0
        """How long the longest of the last steps that took turns was."""
        self._is_counting = False
        """Whether the end of this round is scheduled."""
        self._accounts: dict[str, LoopAccount] = {}
        self._most_accounts = MOST_TENANTS
        self._nobody = LoopAccount("")
        self._current: _Turn | None = None
        self._last_caller = ""
        self._last_at = self._others_last_at = -math.inf
        """When the last caller, and any caller before it, used the loop."""

    def is_over(self, caller: str) -> bool:
        """Whether a caller's requests have to take turns."""
        account = self._accounts.get(caller)
        return account is not None and self._must_wait(account, time.perf_counter())

    def charge(self, caller: str, seconds: float, now: float) -> None:
        """Add loop time that a caller used outside of `run`, until `now` of `perf_counter`."""
        self._account(caller).charge(seconds, now)

    async def enter(self, caller: str) -> None:
        """Charge the rest of the request that runs to a caller, which may have to wait.

        Raises TenantQueueFullError if too many requests of the caller are waiting.
        """
        turn = self._current
        if turn is None:
            return  # A task beside the requests.
        turn.is_known = turn.account is not self._nobody
        turn.account = self._account(caller)
        if self._must_wait(turn.account, time.perf_counter()):
            turn.is_entering = True
            await asyncio.sleep(0)

    @coroutine
    def run(self, request: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        """Run a request, whose steps take turns from its first `enter` on."""
        turn, failure = _Turn(self._nobody), None
        while True:
            taken = None
            enters, turn.is_entering = turn.is_entering, False
            began = time.perf_counter()
            if self._must_wait(turn.account, began) and not turn.has_slice:
                try:
                    # Requests that have begun end first: they may hold what others wait for.
                    take = self._steps.take(
                        turn.account.caller, size=int(enters), is_next=not enters
                    )
                    yield from take.__await__()
                    taken = turn.account.caller
                except BaseException as error:
                    failure = error
                began = time.perf_counter()
            self._current = turn
            try:
                future = request.send(None) if failure is None else request.throw(failure)
            except StopIteration:
                turn.is_known = True  # An anonymous request is its network's.
                return
            finally:
                failure = self._current = None
                now = time.perf_counter()
                turn.account.charge(now - began, now)
                if turn.is_known:
                    self._used(turn.account.caller, now)
                if taken is not None:
                    self._step_seconds = max(now - began, 0.9 * self._step_seconds)
                    self._end(self._steps, taken, now - began)
                else:
                    self._note_free_step(now - began)
            try:
                yield future
            except BaseException as error:
                failure = error
            # Its exception may refer to this frame; the cycle would keep the request's body.
            del future

    def _used(self, caller: str, now: float) -> None:
        if caller != self._last_caller:
            self._last_caller, self._others_last_at = caller, self._last_at
        self._last_at = now

    def _must_wait(self, account: LoopAccount, now: float) -> bool:
        is_crowded = self._free_spent > BURST_SECONDS and account is not self._nobody
        is_over = is_crowded or account.is_over(now)
        return is_over and self._is_shared(account.caller, now)

    def _note_free_step(self, seconds: float) -> None:
        if not self._free_spent:
            asyncio.get_running_loop().call_soon(self._end_free_round)
        self._free_spent += seconds

    def _end_free_round(self) -> None:
        self._free_spent = 0.0

    def _is_shared(self, caller: str, now: float) -> bool:
        at = self._others_last_at if caller == self._last_caller else self._last_at
        return at > now - SHARED_SECONDS

    def _end(self, turns: FairTurns, caller: str, seconds: float) -> None:
        """End a step or slice. The last one of a round closes it."""
        self._spent += seconds
        if seconds > LONG_SECONDS and self._is_shared(caller, time.perf_counter()):
            self._rest += seconds
        if self._spent >= ROUND_SECONDS or turns is self._slices or self._rest:
            self._steps.set_places(0)
            self._slices.set_places(0)
        turns.give_back(caller, seconds=seconds)
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        if self._rest:
            asyncio.get_running_loop().call_later(self._rest, self._end_round)
            self._rest = 0.0
            return
        self._is_counting, self._spent = False, 0.0
        steps = ROUND_SECONDS / max(self._step_seconds, ROUND_SECONDS / MOST_STEPS)
        self._steps.set_places(max(1, int(steps)))
        self._slices.set_places(1)

    @asynccontextmanager
    async def slice_of(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait for a tenant's turn. The block is the slice and awaits at most a thread for it."""
        turn = self._current or _Turn(self._nobody)
        turn.has_slice = True
        try:
            await self._slices.take(tenant_id, size=0)
            began = time.perf_counter()
            try:
                yield
            finally:
                self._end(self._slices, tenant_id, time.perf_counter() - began)
        finally:
            turn.has_slice = False

    async def write(
        self, tenant_id: str, rows: Iterable[T], written: Callable[[Sequence[T]], R]
    ) -> AsyncIterator[R]:
        """Yield what `written` makes of the rows, part by part, in a tenant's turns."""
        rest = iter(rows)
        while True:
            async with self.slice_of(tenant_id):
                part = list(islice(rest, ROWS_OF_SLICE))
                content = written(part)
            if not part:
                return
            yield content

    def _account(self, caller: str) -> LoopAccount:
        account = self._accounts.get(caller)
        if account is None:
            if len(self._accounts) >= self._most_accounts:
                now = time.perf_counter()
                self._accounts = {
                    name: used for name, used in self._accounts.items() if used.drained_at > now
                }
                self._most_accounts = max(MOST_TENANTS, 2 * len(self._accounts))
            account = self._accounts[caller] = LoopAccount(caller)
        return account
