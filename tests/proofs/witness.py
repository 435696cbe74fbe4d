"""Sees every reservation and every job that Redis ever holds, independently of whoever makes them.

Redis itself publishes each change of a key (keyspace notifications), so that none is missed, however
short its life and whoever dies in between.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from contract import keys
from tests.support.stack import MODEL

_RESERVATION = re.compile(r"\{b:\d\d\}:reservation:(.+)")
_JOB_PREFIX = keys.job_prefix(MODEL)
_CHANNEL = "__keyspace@0__:"


@dataclass
class Witness:
    """What has been seen so far."""

    reserved: set[str] = field(default_factory=set)
    """Request ids of all reservations."""
    enqueued: set[str] = field(default_factory=set)
    """Ids of all jobs, waiting or claimed."""
    claimed: set[str] = field(default_factory=set)
    """Ids of all jobs that a worker claimed."""

    @property
    def requests_of_jobs(self) -> set[str]:
        """Request ids of all jobs."""
        return {job_id.rpartition("-")[0] for job_id in self.enqueued}

    def note(self, key: str, event: str) -> None:
        """Take in one change of a key."""
        if key.startswith(_JOB_PREFIX):
            job_id = key.removeprefix(_JOB_PREFIX)
            self.enqueued.add(job_id)
            # Only a claim counts in a job's hash.
            if event == "hincrby":
                self.claimed.add(job_id)
        elif (found := _RESERVATION.fullmatch(key)) and event == "hset":
            self.reserved.add(found[1])


@asynccontextmanager
async def watching(redis: "Redis") -> AsyncIterator[Witness]:
    """Watch for the length of a block; what was published within it has been noted at its end."""
    await redis.config_set("notify-keyspace-events", "Kh")
    await redis.config_set("client-output-buffer-limit", "pubsub 0 0 0")
    witness = Witness()
    listener = redis.pubsub()
    await listener.psubscribe(
        f"{_CHANNEL}{{b:*}}:reservation:*", f"{_CHANNEL}{_JOB_PREFIX}*", "end-of-watch"
    )
    task = asyncio.create_task(_listen(listener, witness))
    try:
        yield witness
        await redis.publish("end-of-watch", "")
        await asyncio.wait_for(task, 30)
    finally:
        task.cancel()
        await listener.aclose()  # type: ignore[no-untyped-call] # redis-py's own
        await redis.config_set("notify-keyspace-events", "")


async def _listen(listener: "PubSub", witness: Witness) -> None:
    async for message in listener.listen():
        if message["type"] != "pmessage":
            continue
        channel = message["channel"].decode()
        if channel == "end-of-watch":
            return
        witness.note(channel.removeprefix(_CHANNEL), message["data"].decode())
