"""Defects that a process is given on purpose, to see that the suite finds them."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

ARMED_FILE = "CHAOS_ARMED_FILE"
"""Names the file without which no defect shows yet."""


def plant(name: str) -> None:
    """Give this process a defect, which shows as soon as the file that ARMED_FILE names is there."""
    PLANTS[name]()


def _is_armed() -> bool:
    return Path(os.environ[ARMED_FILE]).exists()


def _never_reclaim() -> None:
    """Nobody takes back the jobs of a worker that is gone."""
    from contract.queue import JobQueue

    take_back = JobQueue.reclaim

    async def reclaim(self: JobQueue, *given: Any, **named: Any) -> list[Any]:
        return [] if _is_armed() else await take_back(self, *given, **named)

    JobQueue.reclaim = reclaim  # type: ignore[method-assign]


def _skip_settling() -> None:
    """Every tenth request is not settled when it ends."""
    from gateway.quota.reservations import Reservations

    settle, calls = Reservations.settle, [0]

    async def settle_most(self: Reservations, *given: Any, **named: Any) -> Any:
        calls[0] += 1
        return None if calls[0] % 10 == 0 and _is_armed() else await settle(self, *given, **named)

    Reservations.settle = settle_most  # type: ignore[method-assign]


def _charge_more() -> None:
    """Every tenth request is recorded with a token too many."""
    from gateway.accounts.usage import UsageRecord
    from gateway.quota.reservations import Reservations

    settle, calls = Reservations.settle, [0]

    async def settle_more(self: Reservations, record: UsageRecord, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] % 10 == 0 and _is_armed():
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
        if isinstance(message, Delta) and calls[0] % 10 == 0 and _is_armed():
            push(self, prompt_index, message)
        return push(self, prompt_index, message)

    Generation.push = push_again  # type: ignore[method-assign]


def _leave_tasks() -> None:
    """Every request leaves a task behind that never ends."""
    from gateway.dispatch.generation import Generation

    begin, left = Generation.__init__, list[asyncio.Task[Any]]()

    def begin_and_leave(self: Generation, **named: Any) -> None:
        begin(self, **named)
        if _is_armed():
            left.append(asyncio.create_task(_wait_for_ever()))

    Generation.__init__ = begin_and_leave  # type: ignore[method-assign]


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()


def _change_tokens() -> None:
    """The last token that was received is another one in what the next worker goes on from."""
    from contract.messages import SequenceProgress
    from gateway.dispatch.ticket import Progress

    snapshot = Progress.snapshot

    def change(self: Progress) -> SequenceProgress:
        progress = snapshot(self)
        if progress.token_ids and _is_armed():
            progress.token_ids[-1] ^= 1
        return progress

    Progress.snapshot = change  # type: ignore[method-assign]


def _tell_calls_again() -> None:
    """The worker that goes on with a chat tells the last piece of a call once more."""
    from worker.parsing.base import Parsed
    from worker.parsing.reader import Answer, Reader

    read = Reader.read

    def read_again(self: Reader, answer: Answer) -> None:
        if self._known and _is_armed():
            known = [self._ready.popleft() for _ in range(self._known)]
            pieces = [piece for each in known for piece in self._parser.feed(*each).calls]
            self._known = 0
            answer.add(Parsed(calls=pieces[-1:]))
        read(self, answer)

    Reader.read = read_again  # type: ignore[method-assign]


def _forget_what_was_read() -> None:
    """The worker that goes on with a chat reads the rest as if it were the beginning."""
    from worker.parsing.reader import Reader

    forget_told = Reader.forget_told

    def forget_all(self: Reader) -> None:
        if _is_armed():
            self._ready.clear()
        forget_told(self)

    Reader.forget_told = forget_all  # type: ignore[method-assign]


def _make_up_call_ids() -> None:
    """The ids of calls are other ones in each gateway."""
    from gateway.stream.chat_choice import ChatChoice

    call_id = ChatChoice._call_id

    def own_id(self: ChatChoice, call: int) -> str:
        return call_id(self, call + os.getpid() if _is_armed() else call)

    ChatChoice._call_id = own_id  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "lease never reclaimed": _never_reclaim,
    "settlement skipped": _skip_settling,
    "token too many charged": _charge_more,
    "delta twice": _tell_twice,
    "token changed on the way": _change_tokens,
    "task left behind": _leave_tasks,
    "call told again after a cut": _tell_calls_again,
    "reading begins anew after a cut": _forget_what_was_read,
    "call with another id": _make_up_call_ids,
}
