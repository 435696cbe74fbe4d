"""Presence: the gateway's heartbeat in Redis, and outages of Redis."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from common import clock
from common.redis_cluster import Address, slot_map_of, slot_of_key
from common.tasks import tolerating_outage
from contract import keys
from contract.scripts import CommandExecutor
from contract.scripts.cluster import ServerProcesses

ALIVE_SECONDS = 6
"""Other processes consider a gateway dead after this long without a heartbeat."""
FRESH_SECONDS: Final = 4.5
"""Age after which the last heartbeat may expire soon: two in a row were not sent."""
LISTED_MS = 3_600_000
"""How long `known_gateways` has a gateway that did not deregister."""
LEFT_SECONDS = 60
"""Lifetime of the reply stream of a gateway that has stopped."""
_PLACING_SECONDS: Final = 2.0

_log = logging.getLogger(__name__)


class Presence:
    """The registration of one gateway process, and how long Redis has been up."""

    def __init__(self, gateway: str, client: "Redis", *, resume_after_seconds: float) -> None:
        """Create the presence; processes announce themselves within `resume_after_seconds`."""
        self.gateway = gateway
        self.fingerprints = ""
        """Of the gateway's secrets, for `sluice check` to compare."""
        self.outages = 0
        """Outages and restarts of Redis that were detected."""
        self._announced_at = float("-inf")
        self._client = client
        self._resume_after_seconds = resume_after_seconds
        self._processes = ServerProcesses()
        self._began_at = time.monotonic()
        self._steady_since = float("-inf")

    @property
    def is_steady(self) -> bool:
        """Whether Redis has been up long enough for every live process to have announced itself."""
        return time.monotonic() - self._steady_since >= self._resume_after_seconds

    async def is_alive(self, gateway: str, executor: CommandExecutor) -> bool:
        """Whether another gateway is alive, or may be as far as is known. Raises RedisError."""
        had_time = time.monotonic() - self._began_at >= self._resume_after_seconds
        if not (self.is_steady and had_time):
            # After an outage, other gateways may not have sent a heartbeat yet.
            return True
        if await executor.execute_command("EXISTS", keys.gateway_alive(gateway)):
            return True
        # A failover that is not known yet may have lost the heartbeat.
        await self.detect_outage(executor)
        return not self.is_steady

    def note_outage(self) -> None:
        """Give workers time to report the jobs they hold before any job counts as lost."""
        self.outages += 1
        self._steady_since = time.monotonic()
        self._announced_at = float("-inf")

    async def ensure_announced(self, executor: CommandExecutor) -> None:
        """Send a heartbeat if Redis may not have one any more. Raises RedisError.

        Workers drop the jobs of a gateway without one.
        """
        if time.monotonic() - self._announced_at > FRESH_SECONDS:
            sent_at = time.monotonic()
            await executor.execute_command(*self._sign_of_life())
            self._announced_at = sent_at

    async def beat(self) -> None:
        """Send a heartbeat and detect a restarted or replaced Redis. Raises RedisError."""
        await self.announce(self._client)
        await self.detect_outage(self._client)
        await self.enlist(self._client)

    async def detect_outage(self, executor: CommandExecutor) -> None:
        """Detect a restarted or replaced Redis. Raises RedisError."""
        if await self._processes.have_changed(executor):
            self.note_outage()

    async def announce(self, client: "Redis") -> None:
        """Send a heartbeat, which needs only the server of this gateway's keys.

        May be called in another event loop, with a client of that loop. Raises RedisError.
        """
        sent_at, pipeline = time.monotonic(), client.pipeline(transaction=False)
        pipeline.execute_command(*self._sign_of_life())
        pipeline.execute_command("EXPIRE", keys.replies(self.gateway), keys.REPLIES_SECONDS)
        await pipeline.execute()
        self._announced_at = sent_at

    async def enlist(self, client: "Redis") -> None:
        """Note the heartbeat in the list of gateways. Called as `announce`. Raises RedisError."""
        pipeline, now_ms = client.pipeline(transaction=False), clock.now_ms()
        pipeline.execute_command("ZADD", keys.GATEWAYS, now_ms, self.gateway)
        pipeline.execute_command("ZREMRANGEBYSCORE", keys.GATEWAYS, 0, now_ms - LISTED_MS)
        await pipeline.execute()

    async def deregister(self) -> None:
        """Remove the heartbeat, so that workers stop this gateway's remaining jobs at once.

        The reply stream stays for LEFT_SECONDS: journals that could not be written lack the end.
        """
        pipeline = self._client.pipeline(transaction=False)
        pipeline.execute_command("DEL", keys.gateway_alive(self.gateway))
        pipeline.execute_command("ZREM", keys.GATEWAYS, self.gateway)
        pipeline.execute_command("EXPIRE", keys.replies(self.gateway), LEFT_SECONDS)
        with tolerating_outage("deregister the gateway"):
            await pipeline.execute()

    def _sign_of_life(self) -> tuple[str | int, ...]:
        return "SET", keys.gateway_alive(self.gateway), self.fingerprints, "EX", ALIVE_SECONDS


async def new_gateway(client: "Redis") -> str:
    """Return a name for a new gateway.

    In a cluster, the server with the fewest gateways has its keys. Replies are most of the work of
    Redis, and gateways are few: by chance, one of three servers has half of nine gateways. Without
    a reply from Redis, the name is any.
    """
    name = _any_name()
    try:
        async with asyncio.timeout(_PLACING_SECONDS):
            return await _placed(client, name)
    except (RedisError, OSError) as error:
        _log.warning("cannot choose a server for the replies: %s", type(error).__name__)
        return name


async def _placed(client: "Redis", name: str) -> str:
    slots = slot_map_of(client)
    if slots is None:
        return name
    await slots.ready()

    def owner(gateway: str) -> Address:
        return slots.owner(slot_of_key(keys.replies(gateway)))

    now_ms = clock.now_ms()
    counts = Counter(
        owner(gateway)
        for gateway, at_ms in (await known_gateways(client)).items()
        if at_ms > now_ms - ALIVE_SECONDS * 1000
    )
    # Gateways that start at once see the same counts.
    masters = secrets.SystemRandom().sample(slots.masters, len(slots.masters))
    fewest = min(masters, key=counts.__getitem__)
    while owner(name) != fewest:
        name = _any_name()
    await client.zadd(keys.GATEWAYS, {name: now_ms})
    return name


def _any_name() -> str:
    return f"gw-{secrets.token_hex(6)}"


async def known_gateways(client: "Redis") -> dict[str, int]:
    """Return the gateways that have not stopped, with their latest heartbeats in Unix ms.

    Those that are silent for longer than ALIVE_SECONDS are dead. Raises RedisError.
    """
    found: Any = await client.zrange(keys.GATEWAYS, 0, -1, withscores=True)
    return {name.decode(): int(at_ms) for name, at_ms in found}
