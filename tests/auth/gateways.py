"""Gateways as far as authentication goes: several of them, which hear of changes."""

import asyncio

from gateway.auth.authenticator import Authenticator
from gateway.auth.revocation import RevocationListener
from gateway.database.engine import Database
from gateway.errors import ApiError
from gateway.management.keys.service import CreatedKey
from gateway.redis_client import connect
from tests.support.patience import PATIENCE_SECONDS


class Gateway:
    """What one gateway process has of authentication."""

    def __init__(self, database: Database, redis_url: str) -> None:
        self.authenticator = Authenticator(
            database, verifier=None, ttl_seconds=3600, max_entries=100
        )
        self.redis = connect(redis_url, max_connections=4)
        self.listener = RevocationListener(self.redis, self.authenticator)

    async def accepts(self, key: CreatedKey) -> bool:
        """Whether a request with the key gets in."""
        try:
            await self.authenticator.authenticate(f"Bearer {key.key.reveal()}")
        except ApiError:
            return False
        return True

    async def aclose(self) -> None:
        """End the listening."""
        await self.listener.stop()
        await self.redis.aclose()


async def have_found_their_place(gateways: list[Gateway]) -> None:
    """Wait until all listen."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(gateway.listener._last_id is None for gateway in gateways):
            await asyncio.sleep(0.01)


async def until_refused(gateways: list[Gateway], key: CreatedKey) -> None:
    """Wait until no gateway accepts the key. Their caches hold for an hour: they must be notified."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any([await gateway.accepts(key) for gateway in gateways]):
            await asyncio.sleep(0.005)


async def all_accept(gateways: list[Gateway], key: CreatedKey) -> bool:
    """Whether every gateway accepts the key."""
    return all([await gateway.accepts(key) for gateway in gateways])
