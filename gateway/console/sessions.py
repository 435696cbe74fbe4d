"""Sessions of the console in Redis, and links that log in once."""

import hashlib
import secrets
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from contract import clock, keys
from gateway.redis_client import converting_errors

TOKEN_BYTES: Final = 32
LINK_PATH: Final = "/console/enter"
LINK_VALID: Final = timedelta(hours=1)


class Audience(StrEnum):
    """For whom a listener's console is."""

    CUSTOMERS = "customers"
    OPERATORS = "operators"


class KeyLogin(msgspec.Struct, frozen=True):
    """An API key that logged in, without its secret."""

    prefix: str
    digest: bytes
    """SHA-256 of the key."""


class Session(msgspec.Struct, frozen=True):
    """One login in one browser."""

    audience: Audience
    login: KeyLogin
    subject: str
    """Whose sessions `sign_out_everywhere` ends together."""
    csrf: str
    """The token that each form of the session contains."""
    created_ms: int
    ends_ms: int
    """When the session ends however much it is used."""


class Sessions:
    """Stores sessions under the digest of a token that only the browser's cookie has.

    All methods raise StoreUnavailableError.

    Args:
        redis: stores the sessions.
        idle: how long a session continues without a request.
        longest: how long a session continues at most.
    """

    def __init__(self, redis: "Redis", *, idle: timedelta, longest: timedelta) -> None:
        self._redis = redis
        self._idle_ms = int(idle.total_seconds() * 1000)
        self._longest_ms = int(longest.total_seconds() * 1000)

    async def begin(self, audience: Audience, login: KeyLogin, subject: str) -> str:
        """Begin a session and return the token for its cookie."""
        token, now_ms = secrets.token_urlsafe(TOKEN_BYTES), clock.now_ms()
        session = Session(
            audience=audience,
            login=login,
            subject=subject,
            csrf=secrets.token_urlsafe(TOKEN_BYTES),
            created_ms=now_ms,
            ends_ms=now_ms + self._longest_ms,
        )
        with converting_errors(self._redis):
            await self._redis.set(
                keys.console_session(_digest(token)),
                msgspec.msgpack.encode(session),
                px=min(self._idle_ms, self._longest_ms),
            )
        return token

    async def find(self, token: str, audience: Audience) -> Session | None:
        """Return the session of a cookie, which then continues; None if it has ended."""
        key = keys.console_session(_digest(token))
        with converting_errors(self._redis):
            content: Any = await self._redis.getex(key, px=self._idle_ms)
            if content is None:
                return None
            session = msgspec.msgpack.decode(content, type=Session)
            signed_out = await self._redis.get(keys.console_signed_out(session.subject))
        has_ended = clock.now_ms() >= session.ends_ms
        if has_ended or session.audience is not audience:
            return None
        is_signed_out = signed_out is not None and session.created_ms <= int(signed_out)
        return None if is_signed_out else session

    async def end(self, token: str) -> None:
        """End one session."""
        with converting_errors(self._redis):
            await self._redis.delete(keys.console_session(_digest(token)))

    async def sign_out_everywhere(self, subject: str) -> None:
        """End every session that a person or key has begun so far."""
        with converting_errors(self._redis):
            await self._redis.set(
                keys.console_signed_out(subject), clock.now_ms(), px=self._longest_ms
            )


async def make_link(redis: "Redis", login: KeyLogin) -> str:
    """Return a path that logs in once, within `LINK_VALID`. Raises StoreUnavailableError."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with converting_errors(redis):
        await redis.set(
            keys.console_link(_digest(token)), msgspec.msgpack.encode(login), px=LINK_VALID
        )
    return f"{LINK_PATH}?token={token}"


async def use_link(redis: "Redis", token: str) -> KeyLogin | None:
    """Return what the token of a link stands for, and end it; None for a used or expired one.

    Raises StoreUnavailableError.
    """
    with converting_errors(redis):
        content: Any = await redis.getdel(keys.console_link(_digest(token)))
    return None if content is None else msgspec.msgpack.decode(content, type=KeyLogin)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
