"""Records every reservation and job that Redis ever holds, independently of their writers.

Redis itself publishes each change of a key (keyspace notifications), so none is missed, however
short its life and whichever process dies.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from contract import keys
from tests.support.stack import MODEL

_RESERVATION = re.compile(r"\{b:\d\d\}:reservation:(.+)")
_ACCOUNT: Final = ":subject:"
_USAGE: Final = ":usage"
_JOB_PREFIX = keys.job.prefix(MODEL)
_CHANNEL = "__keyspace@0__:"


@dataclass
class Observer:
    """Everything recorded so far."""

    reserved: set[str] = field(default_factory=set)
    """Request ids of all reservations."""
    withdrawn: set[str] = field(default_factory=set)
    """Those that ended without a record of usage, or were refused because their end came first."""
    enqueued: set[str] = field(default_factory=set)
    """Ids of all jobs, waiting or claimed."""
    _recorded: set[str] = field(default_factory=set)
    """Request ids of reservations that have ended with a record of usage."""
    _recording: set[str] = field(default_factory=set)
    """Prefixes of the bucket keys whose latest change is a new record of usage."""

    @property
    def requests_of_jobs(self) -> set[str]:
        """Request ids of all jobs."""
        return {job_id.rpartition("-")[0] for job_id in self.enqueued}

    def note(self, key: str, event: str) -> None:
        """Record one change of a key."""
        if key.startswith(_JOB_PREFIX):
            self.enqueued.add(key.removeprefix(_JOB_PREFIX))
        elif found := _RESERVATION.fullmatch(key):
            self._note_reservation(found[1], event, bucket=key.partition(":reservation:")[0])
        elif key.endswith(_USAGE) and event == "xadd":
            self._recording.add(key.removesuffix(_USAGE))
        # The record is of a request without a reservation; its end counts in the account
        # (quota_end.lua).
        elif _ACCOUNT in key and event == "hincrby":
            self._recording.discard(key.partition(_ACCOUNT)[0])

    def _note_reservation(self, request_id: str, event: str, *, bucket: str) -> None:
        if event == "hset":
            self.reserved.add(request_id)
        # The script that ends a reservation writes its record before it deletes it.
        elif event == "del":
            ended = self._recorded if bucket in self._recording else self.withdrawn
            ended.add(request_id)
            self._recording.discard(bucket)
        # Only the marker of an ended request expires.
        elif event == "expire" and request_id not in self._recorded:
            self.withdrawn.add(request_id)


@asynccontextmanager
async def watching(redis: "Redis") -> AsyncIterator[Observer]:
    """Record changes for the length of a block; all changes within it are recorded at its end."""
    await redis.config_set("notify-keyspace-events", "Kght")
    await redis.config_set("client-output-buffer-limit", "pubsub 0 0 0")
    observer = Observer()
    listener = redis.pubsub()
    await listener.psubscribe(
        f"{_CHANNEL}{{b:*}}:reservation:*",
        f"{_CHANNEL}{{b:*}}{_USAGE}",
        f"{_CHANNEL}{{b:*}}{_ACCOUNT}*",
        f"{_CHANNEL}{_JOB_PREFIX}*",
        "end-of-watch",
    )
    task = asyncio.create_task(_listen(listener, observer))
    try:
        yield observer
        await redis.publish("end-of-watch", "")
        await asyncio.wait_for(task, 30)
    finally:
        task.cancel()
        await listener.aclose()
        await redis.config_set("notify-keyspace-events", "")


async def _listen(listener: "PubSub", observer: Observer) -> None:
    async for message in listener.listen():
        if message["type"] != "pmessage":
            continue
        channel = message["channel"].decode()
        if channel == "end-of-watch":
            return
        observer.note(channel.removeprefix(_CHANNEL), message["data"].decode())
