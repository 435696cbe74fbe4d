"""The authentication of several gateways, which receive changes."""

import asyncio

from gateway.accounts.keys.service import CreatedKey
from gateway.auth.authenticator import Authenticator
from gateway.auth.revocation import RevocationListener
from gateway.platform.database.engine import Database
from gateway.platform.redis_client import connect
from gateway.records.errors import ApiError
from tests.support.patience import PATIENCE_SECONDS


class Gateway:
    """The authentication of one gateway process."""

    def __init__(self, database: Database, redis_url: str) -> None:
        self.authenticator = Authenticator(
            database, verifier=None, ttl_seconds=3600, max_entries=100
        )
        self.redis = connect(redis_url, max_connections=4)
        self.listener = RevocationListener(self.redis, self.authenticator)

    async def accepts(self, key: CreatedKey) -> bool:
        """Whether a request with the key is authenticated."""
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
    """Wait until all gateways listen."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(gateway.listener._last_id is None for gateway in gateways):
            await asyncio.sleep(0.01)


async def until_refused(gateways: list[Gateway], key: CreatedKey) -> None:
    """Wait until no gateway accepts the key, whose cached result only a notice can end."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any([await gateway.accepts(key) for gateway in gateways]):
            await asyncio.sleep(0.005)


async def all_accept(gateways: list[Gateway], key: CreatedKey) -> bool:
    """Whether every gateway accepts the key."""
    return all([await gateway.accepts(key) for gateway in gateways])
