"""Liveness of gateways: the worker generates nothing for a dead one."""

import asyncio
from collections.abc import Iterable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import keys

GRACE_SECONDS = 5.0
"""Time a gateway may be missing, as after a Redis restart, before its running jobs are aborted."""

GONE_SECONDS = 600.0
"""Time after which a missing gateway cannot return under the same id."""


class GatewayWatch:
    """Caches which gateways were alive at the last check."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._alive: set[str] = set()
        self._missing_since: dict[str, float] = {}

    async def check(self, gateways: Iterable[str]) -> None:
        """Check these gateways and drop the state of all others."""
        names = list(gateways)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                _ = pipeline.exists(keys.gateway_alive(name))
            found = await pipeline.execute() if names else []
            missing = [name for name, exists in zip(names, found, strict=True) if not exists]
            for name in missing:
                # A frame written after the gateway left may have re-created its stream.
                _ = pipeline.expire(keys.replies(name), round(GONE_SECONDS))
            if missing:
                await pipeline.execute()
        now = asyncio.get_running_loop().time()
        self._alive = set(names).difference(missing)
        self._missing_since = {name: self._missing_since.get(name, now) for name in missing}

    async def is_alive(self, gateway: str) -> bool:
        """Whether a gateway is alive, as of about the last second."""
        if gateway in self._alive:
            return True
        try:
            is_alive = bool(await self._redis.exists(keys.gateway_alive(gateway)))
        except (RedisError, OSError):
            return True  # Assume so; `check` repeats it.
        if is_alive:
            self._alive.add(gateway)
        return is_alive

    def missing_for(self, seconds: float) -> set[str]:
        """Return the gateways that have been missing for at least this long."""
        now = asyncio.get_running_loop().time()
        return {name for name, since in self._missing_since.items() if now - since >= seconds}
