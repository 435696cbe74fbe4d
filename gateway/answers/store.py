"""Answers in Redis: a typed method for each script."""

from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import Final, NamedTuple

import msgspec

from contract import keys
from contract.scripts import CommandExecutor, LuaScript
from gateway.answers.head import AnswerHead, decode_head, encode_head

_PACKAGE = "gateway.answers.scripts"
_OPEN = LuaScript("answer_open", _PACKAGE)
_APPEND = LuaScript("answer_append", _PACKAGE)
_ADOPT = LuaScript("answer_adopt", _PACKAGE)
_READ = LuaScript("answer_read", _PACKAGE)

PAGE_ENTRIES: Final = 16
"""Journal entries that are read at once: each has the replies of a second, as a rule."""


class AnswerState(StrEnum):
    """Where an answer is in its life."""

    RUNNING = "running"  # Its jobs wait or run; its owner may be dead.
    FINISHED = "finished"
    FAILED = "failed"  # It ended with an error, which reading it tells.
    CANCELLED = "cancelled"  # It was asked to end.
    LEFT = "left"  # Everybody who had read it went away; it goes on when somebody attaches.

    @property
    def is_end(self) -> bool:
        """Whether nothing comes any more."""
        return self not in (AnswerState.RUNNING, AnswerState.LEFT)


class Counts(NamedTuple):
    """Tokens of a request, over all of its jobs."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Standing(NamedTuple):
    """What changes of an answer, beside its journal."""

    state: AnswerState
    reservation: str
    """Id under which it is settled: its own, or one for each time that it was continued after a settlement."""
    settled: Counts
    """What earlier reservations were settled with."""
    handles: tuple[int, ...]
    """Under which the owner follows the jobs; empty if it has not begun to."""


class Appended(Enum):
    """What became of journal entries that were to be written."""

    DONE = 1
    ANOTHERS = 0  # Another gateway has taken the answer over.
    LOST = -1  # Redis has lost the answer, or the end of its journal.


class StoredAnswer(NamedTuple):
    """An answer as Redis has it, and a part of its journal."""

    head: AnswerHead
    owner: str
    term: int
    """Number of its owner, counted from 1."""
    standing: Standing
    entries_in_all: int
    entries: list[bytes]


_encode = msgspec.msgpack.Encoder().encode
_decode_handles = msgspec.msgpack.Decoder(tuple[int, ...]).decode
_decode_counts = msgspec.msgpack.Decoder(Counts).decode


class AnswerStore:
    """Operations on answers. All of them raise RedisError when Redis does not answer."""

    def __init__(self, executor: CommandExecutor) -> None:
        self._executor = executor

    async def open(
        self,
        head: AnswerHead,
        *,
        owner: str,
        term: int,
        standing: Standing,
        live_ms: int,
        entries: Sequence[bytes] = (),
    ) -> bool:
        """Write a whole answer. Return False, changing nothing, if it is another's by now."""
        opened = await _OPEN.run(
            self._executor,
            _keys(head.request_id),
            [
                term,
                live_ms,
                encode_head(head),
                owner,
                _encode(standing.handles),
                standing.reservation,
                standing.state,
                _encode(standing.settled),
                *entries,
            ],
        )
        return bool(opened)

    async def append(
        self,
        request_id: str,
        *,
        term: int,
        index: int,
        entries: Sequence[bytes],
        standing: Standing,
        live_ms: int,
    ) -> Appended:
        """Write what comes behind the first `index` entries of the journal, and how the answer stands.

        It can be repeated with the same entries, and more behind them.
        """
        code = await _APPEND.run(
            self._executor,
            _keys(request_id),
            [
                term,
                live_ms,
                index,
                _encode(standing.handles),
                standing.reservation,
                standing.state,
                _encode(standing.settled),
                *entries,
            ],
        )
        return Appended(code)

    async def adopt(
        self,
        head: AnswerHead,
        *,
        term: int,
        state: AnswerState,
        owner: str,
        live_ms: int,
    ) -> int:
        """End the term `term` of an answer that is in `state`, and let it run, with this head.

        Return the new term, or 0 if the answer is another's or in another state by now.
        """
        new_term: int = await _ADOPT.run(
            self._executor,
            _keys(head.request_id),
            [term, state, live_ms, owner, _encode(()), AnswerState.RUNNING, encode_head(head)],
        )
        return new_term

    async def read(
        self, request_id: str, *, index: int = 0, most: int = PAGE_ENTRIES
    ) -> StoredAnswer | None:
        """Return an answer and at most so many entries from `index` on; None if there is none."""
        fields = await _READ.run(self._executor, _keys(request_id), [index, most])
        if not fields:
            return None
        head, owner, term, handles, reservation, state, settled, in_all, entries = fields
        return StoredAnswer(
            decode_head(head),
            owner.decode(),
            int(term),
            Standing(
                AnswerState(state.decode()),
                reservation.decode(),
                _decode_counts(settled),
                _decode_handles(handles),
            ),
            in_all,
            entries,
        )

    async def discard(self, request_id: str) -> None:
        """Forget an answer."""
        await self._executor.execute_command("DEL", *_keys(request_id))


def _keys(request_id: str) -> list[str]:
    return [keys.answer(request_id), keys.journal(request_id)]
