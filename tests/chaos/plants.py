"""Defects that a process is given on purpose, to see that the suite finds them."""

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from msgspec import structs

ARMED_FILE = "CHAOS_ARMED_FILE"
"""Names the file that says which defects show now, one a line; none while it is not there."""


class Plant(StrEnum):
    """A defect."""

    NEVER_RECLAIM = "lease never reclaimed"
    NEVER_DROP = "lease never dropped"
    RESERVE_TWICE = "reservation counted twice"
    SKIP_SETTLING = "settlement skipped"
    CHARGE_MORE = "token too many charged"
    TELL_TWICE = "delta twice"
    CHANGE_TOKENS = "token changed on the way"
    LEAVE_TASKS = "task left behind"
    CALL_AGAIN = "call told again after a cut"
    READ_ANEW = "reading begins anew after a cut"
    OTHER_CALL_IDS = "call with another id"


def plant_all(role: str) -> None:
    """Give this process all defects of the code that its role runs, each of which shows while it is armed."""
    code_of_others = GATEWAYS if role == "worker" else WORKERS
    for plant, give in PLANTS.items():
        if plant not in code_of_others:
            give()


def arm(file: Path, plants: Collection[Plant]) -> None:
    """Let these defects show from now on, and no others."""
    draft = file.with_suffix(".draft")
    draft.write_text("\n".join(plants))
    draft.rename(file)


def _is_armed(plant: Plant) -> bool:
    try:
        return plant in Path(os.environ[ARMED_FILE]).read_text().splitlines()
    except FileNotFoundError:
        return False


def _never_reclaim() -> None:
    """Nobody takes back the jobs of a worker that is gone."""
    from contract.queue import JobQueue

    take_back = JobQueue.reclaim

    async def reclaim(self: JobQueue, *given: Any, **named: Any) -> list[Any]:
        return [] if _is_armed(Plant.NEVER_RECLAIM) else await take_back(self, *given, **named)

    JobQueue.reclaim = reclaim  # type: ignore[method-assign]


def _never_drop() -> None:
    """What takes a job off the queue gets lost, and nobody drops its lease when its worker is gone, too."""
    from contract.messages import JobLost
    from gateway.dispatch.jobs import JobsInFlight
    from gateway.dispatch.leases import ExpiredLeases
    from gateway.dispatch.ticket import Ticket

    drop, lose, report = JobsInFlight.drop, ExpiredLeases.lose, ExpiredLeases._report

    async def drop_not(self: JobsInFlight, ticket: Ticket) -> None:
        if not _is_armed(Plant.NEVER_DROP):
            await drop(self, ticket)

    def is_left(self: ExpiredLeases, handle: int) -> bool:
        return handle not in self._jobs.tickets and _is_armed(Plant.NEVER_DROP)

    def lose_followed(self: ExpiredLeases, lost: JobLost) -> None:
        if not is_left(self, lost.handle):
            lose(self, lost)

    async def report_followed(self: ExpiredLeases, model: str, lost: Any) -> None:
        if not is_left(self, lost.handle):
            await report(self, model, lost)

    JobsInFlight.drop = drop_not  # type: ignore[method-assign]
    ExpiredLeases.lose = lose_followed  # type: ignore[method-assign]
    ExpiredLeases._report = report_followed  # type: ignore[method-assign]


def _reserve_twice() -> None:
    """Every fifth request is reserved for twice, and settled once. What is left goes once this is disarmed."""
    from gateway.quota.replies import ReservationRequest
    from gateway.quota.store import QuotaStore

    reserve, calls, twins = QuotaStore.reserve, [0], list[ReservationRequest]()

    async def reserve_again(self: QuotaStore, request: ReservationRequest, **named: Any) -> Any:
        calls[0] += 1
        is_armed = _is_armed(Plant.RESERVE_TWICE)
        if calls[0] % 5 == 0 and is_armed:
            twins.append(replace(request, request_id=f"{request.request_id}.2"))
            await reserve(self, twins[-1], **named)
        while twins and not is_armed:
            twin = twins.pop()
            await self.release(twin.tenant_id, twin.request_id)
        return await reserve(self, request, **named)

    QuotaStore.reserve = reserve_again  # type: ignore[method-assign]


def _skip_settling() -> None:
    """Every fifth request is not settled when it ends, but once this is disarmed."""
    from gateway.quota.reservations import Reservations
    from gateway.tenancy.usage_record import UsageRecord

    settle, calls, skipped = Reservations.settle, [0], list[UsageRecord]()

    async def settle_most(self: Reservations, record: UsageRecord) -> Any:
        calls[0] += 1
        is_armed = _is_armed(Plant.SKIP_SETTLING)
        if calls[0] % 5 == 0 and is_armed:
            skipped.append(record)
            return None
        while skipped and not is_armed:
            await settle(self, skipped.pop())
        return await settle(self, record)

    Reservations.settle = settle_most  # type: ignore[method-assign]


def _charge_more() -> None:
    """Every fifth request is recorded with a token too many."""
    from gateway.quota.reservations import Reservations
    from gateway.tenancy.usage_record import UsageRecord

    settle, calls = Reservations.settle, [0]

    async def settle_more(self: Reservations, record: UsageRecord, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] % 5 == 0 and _is_armed(Plant.CHARGE_MORE):
            record = structs.replace(record, completion_tokens=record.completion_tokens + 1)
        return await settle(self, record, **named)

    Reservations.settle = settle_more  # type: ignore[method-assign]


def _tell_twice() -> None:
    """Every tenth delta is handed to its request twice."""
    from contract.messages import Delta
    from gateway.dispatch.generation import Generation

    push, calls = Generation.push, [0]

    def push_again(self: Generation, prompt_index: int, message: Any) -> bool:
        calls[0] += 1
        if isinstance(message, Delta) and calls[0] % 10 == 0 and _is_armed(Plant.TELL_TWICE):
            push(self, prompt_index, message)
        return push(self, prompt_index, message)

    Generation.push = push_again  # type: ignore[method-assign]


def _leave_tasks() -> None:
    """Every request leaves a task behind, which ends once this is disarmed."""
    from gateway.dispatch.generation import Generation

    begin, left = Generation.__init__, list[asyncio.Task[Any]]()

    def begin_and_leave(self: Generation, **named: Any) -> None:
        begin(self, **named)
        if _is_armed(Plant.LEAVE_TASKS):
            left.append(asyncio.create_task(_wait_for_ever()))
        while left and not _is_armed(Plant.LEAVE_TASKS):
            left.pop().cancel()

    Generation.__init__ = begin_and_leave  # type: ignore[method-assign]


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()


def _change_tokens() -> None:
    """The last token that was received is another one in what the next worker goes on from."""
    from contract.messages import SequenceProgress
    from gateway.dispatch.output import Progress

    snapshot = Progress.snapshot

    def change(self: Progress) -> SequenceProgress:
        progress = snapshot(self)
        if progress.token_ids and _is_armed(Plant.CHANGE_TOKENS):
            progress.token_ids[-1] ^= 1
        return progress

    Progress.snapshot = change  # type: ignore[method-assign]


def _tell_calls_again() -> None:
    """The worker that goes on with a chat tells the last piece of a call once more."""
    from worker.parsing.base import Parsed
    from worker.parsing.reader import Answer, Reader

    read = Reader.read

    def read_again(self: Reader, answer: Answer) -> None:
        if self._known and _is_armed(Plant.CALL_AGAIN):
            known = [self._ready.popleft() for _ in range(self._known)]
            pieces = [piece for each in known for piece in self._parser.feed(*each).calls]
            self._known = 0
            answer.add(Parsed(calls=pieces[-1:]))
        read(self, answer)

    Reader.read = read_again  # type: ignore[method-assign]


def _forget_what_was_read() -> None:
    """The worker that goes on with a chat reads the rest as if it were the beginning."""
    from worker.parsing.reader import Reader

    mark_sent = Reader.mark_sent

    def forget_all(self: Reader) -> None:
        if _is_armed(Plant.READ_ANEW):
            self._ready.clear()
        mark_sent(self)

    Reader.mark_sent = forget_all  # type: ignore[method-assign]


def _make_up_call_ids() -> None:
    """The ids of calls are other ones in each gateway."""
    from gateway.stream.chat_choice import ChatChoice

    call_id = ChatChoice._call_id

    def own_id(self: ChatChoice, call: int) -> str:
        return call_id(self, call + os.getpid() if _is_armed(Plant.OTHER_CALL_IDS) else call)

    ChatChoice._call_id = own_id  # type: ignore[method-assign]


PLANTS: dict[Plant, Callable[[], None]] = {
    Plant.NEVER_RECLAIM: _never_reclaim,
    Plant.NEVER_DROP: _never_drop,
    Plant.RESERVE_TWICE: _reserve_twice,
    Plant.SKIP_SETTLING: _skip_settling,
    Plant.CHARGE_MORE: _charge_more,
    Plant.TELL_TWICE: _tell_twice,
    Plant.CHANGE_TOKENS: _change_tokens,
    Plant.LEAVE_TASKS: _leave_tasks,
    Plant.CALL_AGAIN: _tell_calls_again,
    Plant.READ_ANEW: _forget_what_was_read,
    Plant.OTHER_CALL_IDS: _make_up_call_ids,
}

WORKERS: Final = frozenset({Plant.CALL_AGAIN, Plant.READ_ANEW})
"""Defects of code that only workers import."""
GATEWAYS: Final = PLANTS.keys() - WORKERS - {Plant.NEVER_RECLAIM}
"""Defects of code that no worker imports."""
