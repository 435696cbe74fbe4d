"""From the Authorization header to the principal."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from common import clock
from contract.dialect import Dialect
from gateway.accounts.keys.service import CreatedKey, KeyService
from gateway.accounts.tenants.service import TenantService
from gateway.auth.api_key import ApiKey
from gateway.auth.authenticator import MAX_CREDENTIAL_CHARACTERS, Authenticator
from gateway.platform.database.engine import Database
from gateway.records.errors import (
    AccountSuspendedError,
    AuthenticationError,
    ExpiredCredentialError,
    PermissionDeniedError,
    StoreUnavailableError,
)
from gateway.records.scopes import Scope


def _bearer(key: CreatedKey) -> str:
    return f"Bearer {key.key.reveal()}"


@pytest.fixture
def queries(database: Database) -> Iterator[list[str]]:
    """The queries that the database receives."""
    seen: list[str] = []

    def record(_c: object, _cursor: object, statement: str, *_rest: object) -> None:
        if statement.startswith("SELECT"):
            seen.append(statement)

    event.listen(database.engine.sync_engine, "before_cursor_execute", record)
    yield seen
    event.remove(database.engine.sync_engine, "before_cursor_execute", record)


@contextmanager
def _unreachable(database: Database) -> Iterator[None]:
    """Put a folder where the database file was, so that it cannot be opened."""
    assert database.engine.url.database is not None
    file = Path(database.engine.url.database)
    moved = file.rename(file.with_suffix(".moved"))
    file.mkdir()
    yield
    # The driver does not wait for the threads of failed connections, which need the event loop.
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            thread.join(5)
    file.rmdir()
    moved.rename(file)


async def test_key_gives_its_principal(authenticator: Authenticator, keys: KeyService) -> None:
    created = await keys.create("acme", name="web", allowed_models=["m1"])
    principal = await authenticator.authenticate(_bearer(created))
    assert principal.tenant_id == "acme"
    assert principal.tenant_weight == 2.0
    assert principal.credential_id == created.record.id
    assert principal.scopes == {Scope.COMPLETIONS}
    assert principal.allows_model("m1")
    assert not principal.allows_model("m2")


async def test_principal_has_the_dialect_of_key_or_tenant(
    authenticator: Authenticator, tenants: TenantService, keys: KeyService
) -> None:
    await tenants.update("acme", dialect=Dialect.OMLX, strict_parameters=True, default_model="m1")
    plain = await keys.create("acme", name="plain")
    own = await keys.create("acme", name="own", dialect=Dialect.VLLM)
    others = await keys.create("other", name="others")
    for created, expected in (
        (plain, (Dialect.OMLX, True, "m1")),
        (own, (Dialect.VLLM, True, "m1")),
        (others, (None, False, None)),
    ):
        principal = await authenticator.authenticate(_bearer(created))
        assert (principal.dialect, principal.is_strict, principal.default_model) == expected


async def test_changed_options_apply_once_the_change_is_received(
    authenticator: Authenticator, tenants: TenantService, keys: KeyService, key: CreatedKey
) -> None:
    await authenticator.authenticate(_bearer(key))
    await tenants.update("acme", strict_parameters=True)
    authenticator.drop_tenant("acme")
    assert (await authenticator.authenticate(_bearer(key))).is_strict
    await keys.update("acme", key.record.id, dialect=Dialect.LLAMACPP)
    authenticator.drop_key(key.record.id)
    assert (await authenticator.authenticate(_bearer(key))).dialect is Dialect.LLAMACPP


async def test_origins_of_all_tenants_need_one_query_until_one_changes(
    authenticator: Authenticator, database: Database, tenants: TenantService, queries: list[str]
) -> None:
    async def allowed() -> list[str]:
        origins = ("https://a.example", "https://b.example", "null")
        return [origin for origin in origins if await authenticator.allows_origin(origin)]

    assert await allowed() == []
    assert len(queries) == 1
    await tenants.update("acme", cors_origins=("https://a.example",))
    await tenants.update("other", cors_origins=("https://b.example",))
    assert await allowed() == []
    authenticator.drop_tenant("other")
    assert await allowed() == ["https://a.example", "https://b.example"]
    authenticator.expire_all()
    with _unreachable(database):
        assert await allowed() == ["https://a.example", "https://b.example"]


async def test_missing_scope_is_refused(authenticator: Authenticator, key: CreatedKey) -> None:
    principal = await authenticator.authenticate(_bearer(key))
    principal.require_scope(Scope.COMPLETIONS)
    assert principal.allows_model("anything")
    with pytest.raises(PermissionDeniedError, match="scope 'admin'"):
        principal.require_scope(Scope.ADMIN)


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER   {}", "  bEaReR {}  "])
async def test_scheme_is_case_insensitive(
    authenticator: Authenticator, key: CreatedKey, form: str
) -> None:
    principal = await authenticator.authenticate(form.format(key.key.reveal()))
    assert principal.tenant_id == "acme"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "No API key was given"),
        ("", "No API key was given"),
        ("  ", "No API key was given"),
        ("Basic dXNlcjpwYXNz", "does not use the scheme Bearer"),
        ("sk-abc", "does not use the scheme Bearer"),
        ("Bearer", "contains no API key"),
        ("Bearer  ", "contains no API key"),
        ("Bearer " + "x" * (MAX_CREDENTIAL_CHARACTERS + 1), "too long"),
        ("Bearer hello", "malformed"),
        ("Bearer sk-Zürich", "malformed"),
        ("Bearer \ud800", "malformed"),
        ("Bearer a.b.c", "JWTs are not accepted"),
    ],
)
async def test_unusable_header_is_refused_without_a_query(
    authenticator: Authenticator, queries: list[str], header: str | None, message: str
) -> None:
    with pytest.raises(AuthenticationError, match=message) as caught:
        await authenticator.authenticate(header)
    assert caught.value.status == 401
    assert queries == []


async def test_wrong_checksum_is_refused_without_a_query(
    authenticator: Authenticator, key: CreatedKey, queries: list[str]
) -> None:
    whole = key.key.reveal()
    changed = whole[:-1] + ("a" if whole[-1] != "a" else "b")
    with pytest.raises(AuthenticationError, match="checksum") as caught:
        await authenticator.authenticate(f"Bearer {changed}")
    assert queries == []
    assert changed[16:] not in caught.value.message


async def test_unknown_key_and_wrong_secret_give_the_same_error(
    authenticator: Authenticator, key: CreatedKey
) -> None:
    other = ApiKey.generate()
    from gateway.auth.api_key import checksum

    forged_body = f"sk-{key.record.prefix}-{other.reveal()[16:-6]}"
    for text in (other.reveal(), forged_body + checksum(forged_body)):
        with pytest.raises(AuthenticationError, match="unknown or has been revoked") as caught:
            await authenticator.authenticate(f"Bearer {text}")
        assert caught.value.code == "invalid_api_key"


async def test_revoked_key_gives_the_error_of_an_unknown_one(
    authenticator: Authenticator, keys: KeyService, key: CreatedKey
) -> None:
    await keys.revoke("acme", key.record.id)
    with pytest.raises(AuthenticationError, match="unknown or has been revoked"):
        await authenticator.authenticate(_bearer(key))


async def test_cached_key_expires_to_the_second(
    authenticator: Authenticator,
    keys: KeyService,
    queries: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expires_at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    created = await keys.create("acme", name="trial", expires_at=expires_at)
    await authenticator.authenticate(_bearer(created))
    queries.clear()
    at = int(expires_at.timestamp() * 1000)
    monkeypatch.setattr(clock, "now_ms", lambda: at - 1)
    assert (await authenticator.authenticate(_bearer(created))).tenant_id == "acme"
    monkeypatch.setattr(clock, "now_ms", lambda: at)
    with pytest.raises(ExpiredCredentialError, match=f"expired at {expires_at:%Y-%m-%d}") as caught:
        await authenticator.authenticate(_bearer(created))
    assert caught.value.code == "expired_token"
    assert queries == []


async def test_suspended_tenant_is_refused_until_it_is_activated(
    authenticator: Authenticator, tenants: TenantService, key: CreatedKey
) -> None:
    await tenants.suspend("acme")
    with pytest.raises(AccountSuspendedError) as caught:
        await authenticator.authenticate(_bearer(key))
    assert (caught.value.status, caught.value.code) == (403, "account_suspended")
    await tenants.activate("acme")
    authenticator.drop_tenant("acme")
    assert (await authenticator.authenticate(_bearer(key))).tenant_id == "acme"


async def test_concurrent_requests_with_one_key_ask_once(
    authenticator: Authenticator, key: CreatedKey, queries: list[str]
) -> None:
    await asyncio.gather(*(authenticator.authenticate(_bearer(key)) for _ in range(100)))
    await authenticator.authenticate(_bearer(key))
    assert len(queries) == 2, "the key with its owner, and the spend limits"


@pytest.mark.parametrize(
    "drop",
    [
        lambda a, key: a.drop_key(key.record.id),
        lambda a, _key: a.drop_tenant("acme"),
        lambda a, _key: a.expire_all(),
    ],
    ids=["key", "tenant", "everything"],
)
async def test_dropped_key_is_looked_up_again(
    authenticator: Authenticator,
    keys: KeyService,
    key: CreatedKey,
    drop: Callable[[Authenticator, CreatedKey], None],
) -> None:
    await authenticator.authenticate(_bearer(key))
    await keys.revoke("acme", key.record.id)
    assert (await authenticator.authenticate(_bearer(key))).tenant_id == "acme"
    drop(authenticator, key)
    with pytest.raises(AuthenticationError):
        await authenticator.authenticate(_bearer(key))


async def test_dropping_one_tenant_keeps_the_others_cached(
    authenticator: Authenticator, key: CreatedKey, queries: list[str]
) -> None:
    assert authenticator.cached_tenant(_bearer(key)) is None
    await authenticator.authenticate(_bearer(key))
    queries.clear()
    authenticator.drop_tenant("other")
    authenticator.drop_key("key_of_somebody_else")
    await authenticator.authenticate(_bearer(key))
    assert authenticator.cached_tenant(_bearer(key)) == "acme"
    assert queries == []


async def test_cached_keys_work_during_a_database_outage_and_others_get_503(
    database: Database, keys: KeyService, key: CreatedKey
) -> None:
    authenticator = Authenticator(database, verifier=None, ttl_seconds=0.05, max_entries=100)
    unseen = await keys.create("acme", name="unseen")
    await authenticator.authenticate(_bearer(key))
    await database.engine.dispose()
    with _unreachable(database):
        await asyncio.sleep(0.06)
        assert (await authenticator.authenticate(_bearer(key))).tenant_id == "acme"
        with pytest.raises(StoreUnavailableError) as caught:
            await authenticator.authenticate(_bearer(unseen))
    assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
    assert (await authenticator.authenticate(_bearer(unseen))).tenant_id == "acme"


async def test_cached_key_costs_microseconds(authenticator: Authenticator, key: CreatedKey) -> None:
    header = _bearer(key)
    await authenticator.authenticate(header)
    fastest = float("inf")
    for _ in range(20):
        began = time.thread_time()
        for _ in range(1000):
            await authenticator.authenticate(header)
        fastest = min(fastest, (time.thread_time() - began) / 1000)
    assert fastest < 20e-6


async def test_no_log_error_or_repr_carries_a_key(
    database: Database,
    authenticator: Authenticator,
    keys: KeyService,
    key: CreatedKey,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = [repr(key), str(key), repr(key.record)]
    principal = await authenticator.authenticate(_bearer(key))
    shown.append(repr(principal))
    await keys.revoke("acme", key.record.id)
    authenticator.expire_all()
    for header in (_bearer(key), _bearer(key)[:-1], _bearer(key) + "x"):
        with pytest.raises(AuthenticationError) as refused:
            await authenticator.authenticate(header)
        shown += [str(refused.value), repr(refused.value), str(refused.value.body())]
    unseen = await keys.create("acme", name="unseen")
    await database.engine.dispose()
    with _unreachable(database), pytest.raises(StoreUnavailableError) as failed:
        await authenticator.authenticate(_bearer(unseen))
    shown += [repr(failed.value), repr(failed.value.__cause__), caplog.text]
    assert "aiosqlite" in caplog.text, "the log has to be looked at in detail"
    for secret in (key.key.reveal()[16:], unseen.key.reveal()[16:]):
        assert not [text for text in shown if secret in text]
