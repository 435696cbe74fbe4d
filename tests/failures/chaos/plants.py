"""Defects that are planted into a process to check that the suite finds them."""

import asyncio
import os
import signal
from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from msgspec import structs

ARMED_FILE = "CHAOS_ARMED_FILE"
"""The variable with the path of the file that lists the armed defects, one a line."""


class Plant(StrEnum):
    """A defect."""

    NEVER_RECLAIM = "lease never reclaimed"
    NEVER_DROP = "lease never dropped"
    RESERVE_TWICE = "reservation counted twice"
    SKIP_SETTLING = "settlement skipped"
    CHARGE_MORE = "token too many charged"
    DELIVER_TWICE = "delta twice"
    CHANGE_TOKENS = "token changed on the way"
    LEAVE_TASKS = "task never ends"
    CALL_AGAIN = "call sent again after a cut"
    READ_ANEW = "parser restarts after a cut"
    OTHER_CALL_IDS = "call with another id"
    END_UNSETTLED = "response ended before its settlement"
    RUN_LINES_TWICE = "line not found by the next gateway"


def plant_all(role: str) -> None:
    """Plant all defects of this role's code. Each has an effect while armed."""
    code_of_others = GATEWAYS if role == "worker" else WORKERS
    for plant, give in PLANTS.items():
        if plant not in code_of_others:
            give()


def arm(file: Path, plants: Collection[Plant]) -> None:
    """Arm these defects and disarm all others."""
    draft = file.with_suffix(".draft")
    draft.write_text("\n".join(plants))
    draft.rename(file)


def _is_armed(plant: Plant) -> bool:
    try:
        return plant in Path(os.environ[ARMED_FILE]).read_text().splitlines()
    except FileNotFoundError:
        return False


def _never_reclaim() -> None:
    """No process reclaims the jobs of a dead worker."""
    from contract.queue import JobQueue

    take_back = JobQueue.reclaim

    async def reclaim(self: JobQueue, *given: Any, **named: Any) -> list[Any]:
        return [] if _is_armed(Plant.NEVER_RECLAIM) else await take_back(self, *given, **named)

    JobQueue.reclaim = reclaim  # type: ignore[method-assign]


def _never_drop() -> None:
    """A dequeued job gets lost, and no process drops its lease when its worker is dead."""
    from contract.messages import JobLost
    from gateway.completions.queue.jobs import JobsInFlight
    from gateway.completions.queue.lost_jobs import LostJobs
    from gateway.completions.queue.ticket import Ticket

    drop, lose, report = JobsInFlight.drop, LostJobs.lose, LostJobs._report

    async def keep_leases(self: JobsInFlight, ticket: Ticket) -> None:
        if not _is_armed(Plant.NEVER_DROP):
            await drop(self, ticket)

    def is_left(self: LostJobs, handle: int) -> bool:
        return handle not in self._jobs.tickets and _is_armed(Plant.NEVER_DROP)

    def lose_followed(self: LostJobs, lost: JobLost) -> None:
        if not is_left(self, lost.handle):
            lose(self, lost)

    async def report_followed(self: LostJobs, model: str, lost: Any) -> None:
        if not is_left(self, lost.handle):
            await report(self, model, lost)

    JobsInFlight.drop = keep_leases  # type: ignore[method-assign]
    LostJobs.lose = lose_followed  # type: ignore[method-assign]
    LostJobs._report = report_followed  # type: ignore[method-assign]


def _reserve_twice() -> None:
    """Every fifth request is reserved twice and settled once. Disarmed, the rest is settled."""
    from gateway.limits.replies import RequestEnd, ReservationRequest
    from gateway.limits.store import QuotaStore

    reserve, calls, twins = QuotaStore.reserve, [0], list[ReservationRequest]()

    async def reserve_again(self: QuotaStore, request: ReservationRequest, **named: Any) -> Any:
        calls[0] += 1
        is_armed = _is_armed(Plant.RESERVE_TWICE)
        if calls[0] % 5 == 0 and is_armed:
            twins.append(structs.replace(request, request_id=f"{request.request_id}.2"))
            await reserve(self, twins[-1], **named)
        while twins and not is_armed:
            twin = twins.pop()
            await self.end(RequestEnd(tenant_id=twin.tenant_id, request_id=twin.request_id))
        return await reserve(self, request, **named)

    QuotaStore.reserve = reserve_again  # type: ignore[method-assign]


def _skip_settling() -> None:
    """Every fifth request is settled only once this is disarmed."""
    from gateway.limits.replies import RequestEnd
    from gateway.limits.reservations import Reservations

    end, calls, skipped = Reservations.end, [0], list[RequestEnd]()

    async def end_most(self: Reservations, ending: RequestEnd) -> bool:
        if ending.record is None:
            return await end(self, ending)
        calls[0] += 1
        is_armed = _is_armed(Plant.SKIP_SETTLING)
        if calls[0] % 5 == 0 and is_armed:
            skipped.append(ending)
            return True
        while skipped and not is_armed:
            await end(self, skipped.pop())
        return await end(self, ending)

    Reservations.end = end_most  # type: ignore[method-assign]


def _charge_more() -> None:
    """Every fifth request is recorded with one token too many."""
    from gateway.limits.replies import RequestEnd
    from gateway.limits.reservations import Reservations

    end, calls = Reservations.end, [0]

    async def end_with_more(self: Reservations, ending: RequestEnd) -> bool:
        record = ending.record
        if record is None:
            return await end(self, ending)
        calls[0] += 1
        if calls[0] % 5 == 0 and _is_armed(Plant.CHARGE_MORE):
            record = structs.replace(record, completion_tokens=record.completion_tokens + 1)
        return await end(self, structs.replace(ending, record=record))

    Reservations.end = end_with_more  # type: ignore[method-assign]


def _deliver_twice() -> None:
    """Every tenth delta is delivered twice."""
    from contract.messages import Delta
    from gateway.completions.queue.generation import Generation

    push, calls = Generation.push, [0]

    def push_again(self: Generation, prompt_index: int, message: Any) -> bool:
        calls[0] += 1
        if isinstance(message, Delta) and calls[0] % 10 == 0 and _is_armed(Plant.DELIVER_TWICE):
            push(self, prompt_index, message)
        return push(self, prompt_index, message)

    Generation.push = push_again  # type: ignore[method-assign]


def _leave_tasks() -> None:
    """Every request starts a task that ends only once this is disarmed."""
    from gateway.completions.queue.generation import Generation

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
    """The next worker resumes from tokens of which the last is wrong."""
    from contract.messages import SequenceProgress
    from gateway.completions.queue.output import ChoiceOutput

    snapshot = ChoiceOutput.snapshot

    def change(self: ChoiceOutput) -> SequenceProgress:
        progress = snapshot(self)
        if progress.token_ids and _is_armed(Plant.CHANGE_TOKENS):
            progress.token_ids[-1] ^= 1
        return progress

    ChoiceOutput.snapshot = change  # type: ignore[method-assign]


def _resend_calls() -> None:
    """The worker that resumes a chat sends the last piece of a call once more."""
    from worker.parsing.base import Parsed
    from worker.parsing.reader import ParsedOutput, Reader

    read = Reader.read

    def read_again(self: Reader, parsed_output: ParsedOutput) -> None:
        if self._known and _is_armed(Plant.CALL_AGAIN):
            known = [self._ready.popleft() for _ in range(self._known)]
            pieces = [piece for each in known for piece in self._parser.feed(*each).calls]
            self._known = 0
            parsed_output.add(Parsed(calls=pieces[-1:]))
        read(self, parsed_output)

    Reader.read = read_again  # type: ignore[method-assign]


def _reset_parsers() -> None:
    """The worker that resumes a chat parses the rest with a parser in its initial state."""
    from worker.parsing.reader import Reader

    mark_sent = Reader.mark_sent

    def reset(self: Reader) -> None:
        if _is_armed(Plant.READ_ANEW):
            self._ready.clear()
        mark_sent(self)

    Reader.mark_sent = reset  # type: ignore[method-assign]


def _change_call_ids() -> None:
    """Each gateway gives calls different ids."""
    from gateway.completions.rendering.chat_choice import ChatChoice

    call_id = ChatChoice._call_id

    def own_id(self: ChatChoice, call: int) -> str:
        return call_id(self, call + os.getpid() if _is_armed(Plant.OTHER_CALL_IDS) else call)

    ChatChoice._call_id = own_id  # type: ignore[method-assign]


def _end_unsettled() -> None:
    """A gateway dies when the first whole response has ended free of charge."""
    from gateway.completions.stored.owned import OwnedResponse
    from gateway.limits.replies import RequestState
    from gateway.records.usage_record import Counts, Outcome

    finish = OwnedResponse.finish

    async def end_and_die(self: OwnedResponse) -> None:
        if _is_armed(Plant.END_UNSETTLED) and not self.head.record.is_streamed:
            await self.write()
            one = Counts(prompt_tokens=1)
            lost = self.settlement.record.ended(one, free=one, outcome=Outcome.LOST, code="")
            ending = self.settlement._end(lost, state=RequestState.FINISHED)
            await self.settlement._service.reservations.end(ending)
            arm(Path(os.environ[ARMED_FILE]), ())
            os.kill(os.getpid(), signal.SIGKILL)
        await finish(self)

    OwnedResponse.finish = end_and_die  # type: ignore[method-assign]


def _run_lines_twice() -> None:
    """The next gateway runs a line again, as another request."""
    from gateway.batches.line_runner import Line

    shared, shared_id = Line.__dict__["idempotent"].func, Line.__dict__["request_id"].fget

    def own(self: Line) -> Any:
        found = shared(self)
        own_entry = f"{found.entry}{os.getpid()}"
        return found._replace(entry=own_entry) if _is_armed(Plant.RUN_LINES_TWICE) else found

    def own_id(self: Line) -> str:
        is_armed = _is_armed(Plant.RUN_LINES_TWICE)
        return self.endpoint.id_of(f"{self.id} {os.getpid()}") if is_armed else shared_id(self)

    Line.idempotent = property(own)  # type: ignore[assignment,method-assign]
    Line.request_id = property(own_id)  # type: ignore[assignment,method-assign]


PLANTS: dict[Plant, Callable[[], None]] = {
    Plant.NEVER_RECLAIM: _never_reclaim,
    Plant.NEVER_DROP: _never_drop,
    Plant.RESERVE_TWICE: _reserve_twice,
    Plant.SKIP_SETTLING: _skip_settling,
    Plant.CHARGE_MORE: _charge_more,
    Plant.DELIVER_TWICE: _deliver_twice,
    Plant.CHANGE_TOKENS: _change_tokens,
    Plant.LEAVE_TASKS: _leave_tasks,
    Plant.CALL_AGAIN: _resend_calls,
    Plant.READ_ANEW: _reset_parsers,
    Plant.OTHER_CALL_IDS: _change_call_ids,
    Plant.END_UNSETTLED: _end_unsettled,
    Plant.RUN_LINES_TWICE: _run_lines_twice,
}

WORKERS: Final = frozenset({Plant.CALL_AGAIN, Plant.READ_ANEW})
"""Defects of code that only workers import."""
GATEWAYS: Final = PLANTS.keys() - WORKERS - {Plant.NEVER_RECLAIM}
"""Defects of code that no worker imports."""
