"""Sessions of the console in Redis, and what leads to them: links and logins at a provider."""

import base64
import hashlib
import hmac
import secrets
import zlib
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

import msgspec
from cryptography.fernet import Fernet
from redis.asyncio import Redis

from common import clock
from contract import keys
from gateway.platform.redis_client import converting_errors

TOKEN_BYTES: Final = 32
LINK_PATH: Final = "/console/enter"
LINK_VALID: Final = timedelta(hours=1)
MOST_SESSIONS: Final = 20
"""Sessions of one person or key. A new one ends the oldest, so that logins fill no memory."""
MOST_KEPT: Final = 8
"""Pages of one session that are kept, the latest ones."""
KEPT_FOR: Final = timedelta(minutes=10)
ATTEMPT_VALID: Final = timedelta(minutes=10)
"""How long a login at the identity provider may take."""


class Audience(StrEnum):
    """For whom a listener's console is."""

    CUSTOMERS = "customers"
    OPERATORS = "operators"


class KeyLogin(msgspec.Struct, frozen=True, tag="key"):
    """An API key that logged in, without its secret."""

    prefix: str
    digest: bytes
    """SHA-256 of the key."""


class PersonLogin(msgspec.Struct, frozen=True, tag="person"):
    """A person who logged in at the identity provider."""

    issuer: str
    subject: str
    name: str
    """The verified e-mail, or else the subject."""
    tenant_id: str = ""
    """The account that a customer has chosen; empty before the choice, and for operators."""
    operator_values: tuple[str, ...] = ()
    """Values of a claim that the settings map to rights of operators."""
    role_values: tuple[str, ...] = ()
    """Values of a claim that the settings map to roles in tenants."""

    @property
    def owner(self) -> str:
        """Whose sessions `sign_out_everywhere` ends together."""
        return f"oidc:{self.issuer} {self.subject}"


class Attempt(msgspec.Struct, frozen=True):
    """A login at the identity provider that has begun."""

    audience: Audience
    browser: str
    """Digest of the cookie of the browser in which it began."""
    nonce: str
    code_verifier: str
    redirect_uri: str
    following: str
    """The page to show after the login."""


class Session(msgspec.Struct, frozen=True):
    """One login in one browser."""

    audience: Audience
    login: KeyLogin | PersonLogin
    subject: str
    """Whose sessions `sign_out_everywhere` ends together."""
    csrf: str
    """The token that each form of the session contains."""
    created_ms: int
    ends_ms: int
    """When the session ends however much it is used."""
    id_token: bytes = b""
    """The person's ID token, sealed with the token of the cookie; empty for a key."""


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

    async def begin(
        self,
        audience: Audience,
        login: KeyLogin | PersonLogin,
        subject: str,
        *,
        id_token: str = "",
    ) -> str:
        """Begin a session and return the token for its cookie."""
        token, now_ms = secrets.token_urlsafe(TOKEN_BYTES), clock.now_ms()
        session = Session(
            audience=audience,
            login=login,
            subject=subject,
            csrf=secrets.token_urlsafe(TOKEN_BYTES),
            created_ms=now_ms,
            ends_ms=now_ms + self._longest_ms,
            id_token=_box(token).encrypt(id_token.encode()) if id_token else b"",
        )
        digest, latest = _digest(token), keys.console_sessions(subject)
        with converting_errors(self._redis):
            await self._redis.zadd(latest, {digest: now_ms})
            await self._redis.pexpire(latest, self._longest_ms)
            oldest: Any = await self._redis.zrange(latest, 0, -MOST_SESSIONS - 1)
            for each in oldest:
                await self._redis.delete(keys.console_session(each.decode()))
                await self._redis.zrem(latest, each)
            await self._redis.set(
                keys.console_session(digest),
                msgspec.msgpack.encode(session),
                px=min(self._idle_ms, self._longest_ms),
            )
        return token

    async def find(self, token: str, audience: Audience) -> Session | None:
        """Return the session of a cookie, which then continues; None if it has ended."""
        key = keys.console_session(_digest(token))
        with converting_errors(self._redis):
            session = _decode(await self._redis.getex(key, px=self._idle_ms))
            if session is None:
                return None
            signed_out = await self._redis.get(keys.console_signed_out(session.subject))
        has_ended = clock.now_ms() >= session.ends_ms
        if has_ended or session.audience is not audience:
            return None
        is_signed_out = signed_out is not None and session.created_ms <= int(signed_out)
        return None if is_signed_out else session

    async def choose(self, token: str, session: Session, login: PersonLogin) -> None:
        """Let a session continue with another account; forms of the former one become invalid."""
        changed = msgspec.structs.replace(
            session, login=login, csrf=secrets.token_urlsafe(TOKEN_BYTES)
        )
        with converting_errors(self._redis):
            # A session that has ended stays so.
            await self._redis.set(
                keys.console_session(_digest(token)),
                msgspec.msgpack.encode(changed),
                px=self._idle_ms,
                xx=True,
            )

    async def keep(self, token: str, page: bytes) -> int:
        """Keep a page that only the browser with this token can read, for `KEPT_FOR`.

        Return its number. Only the latest `MOST_KEPT` are kept.
        """
        key, sealed = keys.console_kept(_digest(token)), _box(token).encrypt(zlib.compress(page))
        redis: Any = self._redis
        with converting_errors(self._redis):
            number: int = await redis.hincrby(key, "next", 1)
            await redis.hset(key, str(number), sealed)
            await redis.hdel(key, str(number - MOST_KEPT))
            await redis.pexpire(key, KEPT_FOR)
        return number

    async def kept(self, token: str, number: str) -> bytes | None:
        """Return a page that was kept; None if it is not any more."""
        redis: Any = self._redis
        with converting_errors(self._redis):
            sealed = await redis.hget(keys.console_kept(_digest(token)), number)
        return None if sealed is None else zlib.decompress(_box(token).decrypt(sealed))

    async def end(self, token: str) -> None:
        """End one session."""
        digest = _digest(token)
        with converting_errors(self._redis):
            session = _decode(await self._redis.getdel(keys.console_session(digest)))
            await self._redis.delete(keys.console_kept(digest))
            if session is not None:
                await self._redis.zrem(keys.console_sessions(session.subject), digest)

    async def sign_out_everywhere(self, subject: str) -> None:
        """End every session that a person or key has begun so far."""
        with converting_errors(self._redis):
            await self._redis.set(
                keys.console_signed_out(subject), clock.now_ms(), px=self._longest_ms
            )


def _decode(content: Any) -> Session | None:
    try:
        return None if content is None else msgspec.msgpack.decode(content, type=Session)
    except msgspec.ValidationError:
        return None  # Of another release.


async def make_link(redis: "Redis", login: KeyLogin) -> str:
    """Return a path that logs in once, within `LINK_VALID`. Raises StoreUnavailableError."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with converting_errors(redis):
        await redis.set(
            keys.console_link(_digest(token)), msgspec.msgpack.encode(login), px=LINK_VALID
        )
    return f"{LINK_PATH}?token={token}"


async def use_link(redis: "Redis", token: str, *, ends: bool = True) -> KeyLogin | None:
    """Return what the token of a link stands for, and end it; None for a used or expired one.

    Raises StoreUnavailableError.
    """
    with converting_errors(redis):
        take = redis.getdel if ends else redis.get
        content: Any = await take(keys.console_link(_digest(token)))
    return None if content is None else msgspec.msgpack.decode(content, type=KeyLogin)


async def begin_attempt(
    redis: "Redis", audience: Audience, *, redirect_uri: str, following: str
) -> tuple[str, str, Attempt]:
    """Begin a login at the identity provider.

    Return its state, the token for the cookie of the browser, and what is stored. Raises
    StoreUnavailableError.
    """
    state, browser, nonce = (secrets.token_urlsafe(TOKEN_BYTES) for _ in range(3))
    attempt = Attempt(
        audience=audience,
        browser=_digest(browser),
        nonce=nonce,
        code_verifier=secrets.token_urlsafe(TOKEN_BYTES),
        redirect_uri=redirect_uri,
        following=following,
    )
    with converting_errors(redis):
        await redis.set(
            keys.console_attempt(_digest(state)),
            msgspec.msgpack.encode(attempt),
            px=ATTEMPT_VALID,
        )
    return state, browser, attempt


async def use_attempt(
    redis: "Redis", audience: Audience, *, state: str, browser: str
) -> Attempt | None:
    """Return the login that began with this state in this browser, and end it.

    Return None if there is none any more. Raises StoreUnavailableError.
    """
    with converting_errors(redis):
        content: Any = await redis.getdel(keys.console_attempt(_digest(state)))
    if content is None:
        return None
    attempt = msgspec.msgpack.decode(content, type=Attempt)
    is_same = hmac.compare_digest(attempt.browser, _digest(browser))
    return attempt if is_same and attempt.audience is audience else None


def open_id_token(session: Session, token: str) -> str | None:
    """Return the ID token of a session with its cookie's token; None for a key's session."""
    return _box(token).decrypt(session.id_token).decode() if session.id_token else None


def _box(token: str) -> Fernet:
    """Return the cipher of a session: Redis alone cannot decrypt what it encrypts."""
    secret = hashlib.sha256(f"id-token {token}".encode()).digest()
    return Fernet(base64.urlsafe_b64encode(secret))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
