"""Records every request and job that Redis ever holds, independently of their writers.

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

_REQUEST = re.compile(r"\{b:\d\d\}:request:(.+)")
_ACCOUNT: Final = ":subject:"
_USAGE: Final = ":usage"
_JOB_PREFIX = keys.job.prefix(MODEL)
_CHANNEL = "__keyspace@0__:"


@dataclass
class Observer:
    """Everything recorded so far."""

    reserved: set[str] = field(default_factory=set)
    """Ids of all claimed or admitted requests."""
    withdrawn: set[str] = field(default_factory=set)
    """Those that ended without a record of usage, or were refused because their end came first."""
    enqueued: set[str] = field(default_factory=set)
    """Ids of all jobs, waiting or claimed."""
    _recorded: set[str] = field(default_factory=set)
    """Ids of requests that have ended with a record of usage."""
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
        elif found := _REQUEST.fullmatch(key):
            self._note_request(found[1], event, bucket=key.partition(":request:")[0])
        elif key.endswith(_USAGE) and event == "xadd":
            self._recording.add(key.removesuffix(_USAGE))
        # The record of usage is of a request that Redis has lost; its end counts in the account
        # (request_end.lua).
        elif _ACCOUNT in key and event == "hincrby":
            self._recording.discard(key.partition(_ACCOUNT)[0])

    def _note_request(self, request_id: str, event: str, *, bucket: str) -> None:
        if event == "hset":
            self.reserved.add(request_id)
        # The script that ends a request writes its record of usage before it deletes the record of
        # the request, or lets it expire. A claimed request expires too, until it is admitted.
        elif event in ("del", "expire") and request_id not in self._recorded:
            ended = self._recorded if bucket in self._recording else self.withdrawn
            ended.add(request_id)
            self._recording.discard(bucket)
        elif event == "persist":
            self.withdrawn.discard(request_id)


@asynccontextmanager
async def watching(redis: "Redis") -> AsyncIterator[Observer]:
    """Record changes for the length of a block; all changes within it are recorded at its end."""
    await redis.config_set("notify-keyspace-events", "Kght")
    await redis.config_set("client-output-buffer-limit", "pubsub 0 0 0")
    observer = Observer()
    listener = redis.pubsub()
    await listener.psubscribe(
        f"{_CHANNEL}{{b:*}}:request:*",
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
