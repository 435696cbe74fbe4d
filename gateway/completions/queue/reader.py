"""Reply reader: read a gateway's reply stream once and in order, and detect gaps."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from common.tasks import raise_if_cancelled
from contract import messages
from contract.messages import Frame
from gateway.completions.queue.presence import Presence
from gateway.platform import telemetry
from gateway.platform.redis_client import COMMAND_TIMEOUT_SECONDS, shared_connection

READ_BLOCK_MS = 1_000
READ_ENTRIES = 256
RETRY_SECONDS = 0.2
MOST_WORKERS = 10_000
"""Workers whose frames are numbered here. Each start of a worker counts, and has another name."""

_START = b"0-0"

EntryId = tuple[int, int]
"""Id of a stream entry: milliseconds by the clock of Redis, and a number."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ReplyReader:
    """Reads one stream as long as the process runs."""

    _client: Redis
    _stream: str
    _presence: Presence
    _on_frame: Callable[[Frame], None]
    _on_gap: Callable[[str], None]
    """Gets the worker of a lost frame."""

    def __post_init__(self) -> None:
        self.last_entry = _START
        """The last entry whose frame was delivered."""
        self.read_bytes = 0
        """Bytes of all frames that were read."""
        self._blocking = shared_connection(self._client, timeout_seconds=COMMAND_TIMEOUT_SECONDS)
        """A connection of its own: nothing else is sent while a read waits for entries."""
        self._frame_numbers: dict[str, int] = {}
        self._outages = self._presence.outages
        """`Presence.outages` when the position in the stream was last checked."""
        self._read_before = _START

    async def run(self) -> None:
        """Read until cancelled, then close the connection."""
        try:
            await self._keep_reading()
        finally:
            # A connection that is being opened would otherwise outlive the client.
            await self._blocking.aclose()

    async def _keep_reading(self) -> None:
        while True:
            try:
                if self._outages != self._presence.outages:
                    await self._find_place()
                reply = await self._blocking.execute_command(
                    *("XREAD", "COUNT", READ_ENTRIES, "BLOCK", READ_BLOCK_MS),
                    *("STREAMS", self._stream, self.last_entry),
                )
            except RedisError as error:
                logger.warning("cannot read replies: %s", type(error).__name__)
                raise_if_cancelled()
                self._presence.note_outage()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            raise_if_cancelled()
            for entry_id, fields in _entries(reply):
                self.last_entry = entry_id
                self._read(entry_id, fields)
                # Let requests process their replies in between, even after a long outage.
                await asyncio.sleep(0)

    async def _find_place(self) -> None:
        """Find where to continue; start over if the stream lost the last entry that was read.

        In an emptied Redis, or a replica after failover, entries may have lower ids than those read
        before. Frame numbers identify frames that are read twice.
        """
        outages = self._presence.outages
        try:
            info = await self._client.xinfo_stream(self._stream)
            newest: bytes = info["last-generated-id"]
        except ResponseError:
            newest = _START
        if entry_id_of(newest) < entry_id_of(self.last_entry):
            logger.warning("the reply stream was reset: reading it from its start")
            self._read_before = max(self._read_before, newest, key=entry_id_of)
            self.last_entry = _START
        self._outages = outages

    def _read(self, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        try:
            content = fields[b"f"]
            self.read_bytes += len(content)
            frame = messages.decode_frame(content)
        except (msgspec.MsgspecError, KeyError):
            # The worker's next frame reveals the gap.
            logger.exception("cannot decode a reply frame")
            return
        telemetry.REPLY_FRAMES.inc()
        if frame.number == 0 or self._is_next(frame, entry_id):
            self._on_frame(frame)

    def _is_next(self, frame: Frame, entry_id: bytes) -> bool:
        expected = self._frame_numbers.get(frame.worker, 0) + 1
        if frame.number == 1 and expected > 2 and not self._was_read(entry_id):
            expected = 1  # The worker considered this gateway dead and starts numbering again.
        if frame.number < expected:
            return False  # The worker sent it again because it received no reply.
        # The workers that sent last are last.
        self._frame_numbers.pop(frame.worker, None)
        self._frame_numbers[frame.worker] = frame.number
        if len(self._frame_numbers) > MOST_WORKERS:
            del self._frame_numbers[next(iter(self._frame_numbers))]
        if frame.number > expected:
            logger.error(
                "frames %d to %d of worker %s are lost", expected, frame.number - 1, frame.worker
            )
            self._on_gap(frame.worker)
        return True

    def _was_read(self, entry_id: bytes) -> bool:
        return entry_id_of(entry_id) <= entry_id_of(self._read_before)


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of an XREAD reply, a dict or a list depending on the protocol version."""
    if not reply:
        return []
    streams = reply.items() if isinstance(reply, dict) else reply
    return [entry for _, entries in streams for entry in entries]


def entry_id_of(entry_id: bytes) -> EntryId:
    """Return the id of a stream entry in a form that sorts."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)
