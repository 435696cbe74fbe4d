"""Cost of authenticating a request whose key the gateway has cached."""

import asyncio
import time
from typing import Final

from gateway.auth.authenticator import Authenticator
from gateway.platform.database.engine import Database

_ROUNDS: Final = 5
_TIMES: Final = 10_000


def measure(database_url: str, api_key: str) -> list[float]:
    """Return the CPU time of one authentication in microseconds, one figure for each round."""
    return asyncio.run(_measure(database_url, f"Bearer {api_key}"))


async def _measure(database_url: str, authorization: str) -> list[float]:
    database = Database(database_url)
    authenticator = Authenticator(database, verifier=None, ttl_seconds=3600.0, max_entries=10)
    try:
        await authenticator.authenticate(authorization)
        return [await _round(authenticator, authorization) for _ in range(_ROUNDS)]
    finally:
        await database.aclose()


async def _round(authenticator: Authenticator, authorization: str) -> float:
    began = time.process_time()
    for _ in range(_TIMES):
        await authenticator.authenticate(authorization, address="127.0.0.1")
    return 1e6 * (time.process_time() - began) / _TIMES
