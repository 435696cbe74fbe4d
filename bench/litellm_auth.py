"""Keys and their limits for LiteLLM's proxy without a database: its hook for authentication.

The proxy imports this file from the folder of its configuration. Environment variables contain the
keys. The proxy's own limiter counts their requests and tokens in Redis.
"""

import os

from fastapi import HTTPException, Request
from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth

_ENOUGH = 10**9
"""A limit that no measurement reaches."""
_REQUESTS_PER_MINUTE = {
    os.environ["BENCH_KEY"]: _ENOUGH,
    os.environ["BENCH_LIMITED_KEY"]: int(os.environ["BENCH_REQUESTS_PER_MINUTE"]),
}


async def authenticate(request: Request, api_key: str) -> UserAPIKeyAuth:
    """Return the limits of a key, of its team and of its user. Raises HTTPException with 401."""
    del request
    requests_per_minute = _REQUESTS_PER_MINUTE.get(api_key)
    if requests_per_minute is None:
        raise HTTPException(401, "unknown key")
    return UserAPIKeyAuth(
        api_key=api_key,
        user_id="bench",
        team_id="bench",
        user_role=LitellmUserRoles.INTERNAL_USER,
        rpm_limit=requests_per_minute,
        tpm_limit=_ENOUGH,
        team_rpm_limit=_ENOUGH,
        team_tpm_limit=_ENOUGH,
        user_rpm_limit=_ENOUGH,
        user_tpm_limit=_ENOUGH,
        max_parallel_requests=_ENOUGH,
    )
