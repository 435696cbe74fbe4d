"""Unread replies: what a former owner left in its reply stream, read once for all its responses."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from contract import keys, messages
from contract.messages import Frame, JobMessage
from gateway.completions.queue.reader import EntryId, entry_id_of
from gateway.completions.stored.history import frame_messages
from gateway.completions.stored.journal import Received

FRAMES_AT_ONCE: Final = 64

logger = logging.getLogger(__name__)


class UnreadReplies:
    """The reply stream of one former owner, from the first entry that a takeover needed.

    A gateway that dies may leave hundreds of responses. Reading its stream for each of them would
    keep the event loop of the next owner busy for seconds.
    """

    def __init__(self, client: "Redis", *, former: str, gateway: str) -> None:
        """`gateway` takes responses of `former` over."""
        self._client = client
        self._stream = keys.replies(former)
        self._gateway = gateway
        self._first: EntryId | None = None
        self._last: EntryId | None = None
        """All entries after `_first`, up to `_last`, were read."""
        self._by_handle = defaultdict[int, list[tuple[EntryId, int, JobMessage]]](list)
        """Messages with their entries, and their places in these."""
        self._lock = asyncio.Lock()

    async def of(self, handles: Sequence[int], *, after: EntryId) -> list[Received]:
        """Return the replies to the jobs of one response after an entry, in order.

        `handles[i]` is the handle of prompt `i`. The former owner may live, although it sent no
        heartbeat. It delivers no reply after the notice that ends what is returned, so its clients
        received nothing else. Raises RedisError.
        """
        end = await self._stop_former(handles)
        async with self._lock:
            if self._first is None or self._last is None:
                self._first = self._last = after
            if after < self._first:
                await self._read(after, self._first)
                self._first = after
            if end > self._last:
                await self._read(self._last, end)
                self._last = end
        found = [
            (entry, place, Received(index, message))
            for index, handle in enumerate(handles)
            for entry, place, message in self._by_handle[handle]
            if after < entry < end
        ]
        return [received for *_, received in sorted(found, key=itemgetter(0, 1))]

    async def _stop_former(self, handles: Sequence[int]) -> EntryId:
        notice = messages.encode(Frame(self._gateway, 0, taken_over=list(handles)))
        pipeline = self._client.pipeline(transaction=False)
        pipeline.execute_command("XADD", self._stream, "*", "f", notice)
        pipeline.execute_command("EXPIRE", self._stream, keys.REPLIES_SECONDS)
        entry, _ = await pipeline.execute()
        return entry_id_of(entry)

    async def _read(self, after: EntryId, until: EntryId) -> None:
        found: list[tuple[EntryId, int, JobMessage]] = []
        frames: Any = [None] * FRAMES_AT_ONCE
        while len(frames) == FRAMES_AT_ONCE:
            frames = await self._client.xrange(
                self._stream, min=f"({_text(after)}", max=_text(until), count=FRAMES_AT_ONCE
            )
            for entry, fields in frames:
                after = entry_id_of(entry)
                found += [
                    (after, place, message) for place, message in enumerate(_messages(fields))
                ]
        for each in found:
            self._by_handle[each[-1].handle].append(each)


def _messages(fields: dict[bytes, bytes]) -> list[JobMessage]:
    try:
        return list(frame_messages(messages.decode_frame(fields[b"f"])))
    except (msgspec.MsgspecError, KeyError):
        # The frame is lost; its jobs resume after the output before it.
        logger.exception("cannot decode a reply frame")
        return []


def _text(entry: EntryId) -> str:
    return f"{entry[0]}-{entry[1]}"
