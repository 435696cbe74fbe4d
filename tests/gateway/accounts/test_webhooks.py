"""Webhooks: registered, tested, removed; and their events."""

import asyncio
import base64
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from redis.asyncio import Redis
from sqlalchemy import select, update

from gateway.accounts.audit.log import AuditLog
from gateway.accounts.tenants.service import TenantService
from gateway.accounts.webhooks.secret_box import SealedSecretError, SecretBox
from gateway.accounts.webhooks.service import (
    MAX_WEBHOOKS,
    EventName,
    WebhookService,
    add_events,
    encrypt_secrets,
    known_events,
    make_event,
)
from gateway.jobs.webhooks import lock_due
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import WebhookEventRow, WebhookRow
from gateway.records.errors import (
    BadRequestError,
    ConflictError,
    InvalidParameterError,
    NotFoundError,
)
from gateway.records.records import Webhook
from gateway.records.times import utc_now
from tests.support.cases import all_cases
from tests.support.kinds import every_database
from tests.support.secret_box import BOX, ENCRYPTION_KEY, OTHER_ENCRYPTION_KEY

URL = "https://example.com/hooks/T0KEN?key=hidden"
SECOND = timedelta(seconds=1)


@pytest.fixture
async def webhooks(database: Database, redis: Redis, tenants: TenantService) -> WebhookService:
    await tenants.create("Acme", tenant_id="acme")
    await tenants.create("Other", tenant_id="other")
    return WebhookService(database, BOX)


async def _add_event(database: Database, webhook: Webhook, threshold: int = 50) -> str:
    name = EventName(webhook.id, "budget.threshold", "t:acme", "2026-11", threshold)
    event = make_event(name, "acme", {"threshold": threshold})
    async with database.writing() as transaction:
        assert await add_events(transaction, [event]) == 1
    return event.id


async def _due(database: Database) -> list[tuple[WebhookEventRow, WebhookRow]]:
    async with database.writing() as transaction:
        rows = await lock_due(transaction, utc_now() + SECOND, 10)
        return [(row, await transaction.get_one(WebhookRow, row.webhook_id)) for row in rows]


async def test_webhook_is_stored(webhooks: WebhookService) -> None:
    created = await webhooks.create("acme", URL, thresholds=[90, 10])
    assert re.fullmatch(r"whk_[0-9a-f]{16}", created.id)
    assert re.fullmatch(r"whsec_[0-9a-f]{64}", created.secret)
    assert created.secret not in repr(created)
    assert created.thresholds == (10, 90)
    assert await webhooks.list_of_tenant("acme") == [replace(created, secret="")]
    assert await webhooks.list_of_tenant("other") == []
    other = await webhooks.create("acme", URL)
    assert other.thresholds == (50, 80, 100)
    assert other.secret != created.secret


@all_cases("thresholds", [[], [0], [101], [-5], [50, 50], list(range(1, 12))], ids=str)
async def test_wrong_thresholds_are_refused(
    webhooks: WebhookService, thresholds: list[int]
) -> None:
    with pytest.raises(InvalidParameterError, match="'thresholds' must be") as caught:
        await webhooks.create("acme", URL, thresholds=thresholds)
    assert caught.value.param == "thresholds"
    assert await webhooks.list_of_tenant("acme") == []


async def test_private_hosts_are_allowed_only_by_setting(
    webhooks: WebhookService, database: Database
) -> None:
    with pytest.raises(InvalidParameterError):
        await webhooks.create("acme", "http://127.0.0.1:9/x")
    allowing = WebhookService(database, BOX, allows_private=True)
    assert (await allowing.create("acme", "http://127.0.0.1:9/x")).url == "http://127.0.0.1:9/x"


async def test_secret_is_kept_encrypted_and_nothing_is_registered_without_a_key(
    webhooks: WebhookService, database: Database
) -> None:
    created = await webhooks.create("acme", URL)
    [stored] = await _stored(database)
    assert stored.secret == ""
    assert stored.sealed_secret is not None
    assert created.secret.encode() not in stored.sealed_secret
    assert BOX.open(stored.sealed_secret) == created.secret
    with pytest.raises(SealedSecretError):
        SecretBox([OTHER_ENCRYPTION_KEY]).open(stored.sealed_secret)
    keyless = WebhookService(database, SecretBox())
    with pytest.raises(BadRequestError, match="SLUICE_ENCRYPTION_KEYS"):
        await keyless.create("acme", URL)
    assert await keyless.list_of_tenant("acme") == [replace(created, secret="")]


@every_database
async def test_plain_and_former_secrets_are_encrypted_with_the_first_key(
    webhooks: WebhookService, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.accounts.webhooks.service.AT_ONCE", 2)
    created = [await webhooks.create("acme", URL) for _ in range(4)]
    secrets = {webhook.id: webhook.secret for webhook in created}
    plain, foreign, *_ = secrets
    lost = SecretBox([base64.b64encode(b"x" * 32).decode()]).seal("lost")
    async with database.writing() as transaction:
        for webhook_id, columns in (
            (plain, {"secret": secrets[plain], "sealed_secret": None}),
            (foreign, {"sealed_secret": lost}),
        ):
            row = update(WebhookRow).where(WebhookRow.id == webhook_id)
            await transaction.execute(row.values(**columns))
    assert await encrypt_secrets(database, SecretBox()) == 0
    rotated = SecretBox([OTHER_ENCRYPTION_KEY, ENCRYPTION_KEY])
    assert await encrypt_secrets(database, rotated) == 3
    assert await encrypt_secrets(database, rotated) == 0
    only_new = SecretBox([OTHER_ENCRYPTION_KEY])
    for stored in await _stored(database):
        assert (stored.secret, stored.sealed_secret is None) == ("", False)
        if stored.id == foreign:
            assert stored.sealed_secret == lost
        else:
            assert only_new.open(stored.sealed_secret or b"") == secrets[stored.id]


async def _stored(database: Database) -> Sequence[WebhookRow]:
    async with database.reading() as transaction:
        return (await transaction.scalars(select(WebhookRow))).all()


@every_database
async def test_tenant_has_at_most_five_webhooks_despite_concurrency(
    webhooks: WebhookService,
) -> None:
    results = await asyncio.gather(
        *(webhooks.create("acme", URL) for _ in range(MAX_WEBHOOKS + 3)), return_exceptions=True
    )
    assert sum(isinstance(result, ConflictError) for result in results) == 3
    kept = await webhooks.list_of_tenant("acme")
    assert len(kept) == MAX_WEBHOOKS == 5
    await webhooks.create("other", URL)
    await webhooks.remove("acme", kept[0].id)
    await webhooks.create("acme", URL)


async def test_unknown_and_other_tenants_webhooks_are_not_found(
    webhooks: WebhookService,
) -> None:
    webhook = await webhooks.create("acme", URL)
    for tenant_id, webhook_id in (
        ("other", webhook.id),
        ("acme", "whk_0"),
        ("acme", "a\0b"),
        ("nobody", webhook.id),
    ):
        with pytest.raises(NotFoundError):
            await webhooks.remove(tenant_id, webhook_id)
        with pytest.raises(NotFoundError):
            await webhooks.test(tenant_id, webhook_id)
    with pytest.raises(NotFoundError, match="no tenant"):
        await webhooks.list_of_tenant("nobody")
    with pytest.raises(NotFoundError, match="no tenant"):
        await webhooks.create("nobody", URL)
    await webhooks.remove("acme", webhook.id)
    with pytest.raises(NotFoundError):
        await webhooks.remove("acme", webhook.id)


async def test_audit_names_the_host_and_no_secret(
    webhooks: WebhookService, database: Database
) -> None:
    webhook = await webhooks.create("acme", URL, actor="key:k1")
    await webhooks.remove("acme", webhook.id, actor="key:k2")
    async with database.reading() as transaction:
        removed, created, *_ = await AuditLog(transaction).entries(tenant_id="acme")
    assert (created.action, created.subject, created.actor) == (
        "webhook.create",
        webhook.id,
        "key:k1",
    )
    assert (removed.action, removed.actor) == ("webhook.remove", "key:k2")
    assert created.details == {"host": "example.com", "thresholds": [50, 80, 100]}
    for secret in (webhook.secret, "T0KEN", "hidden"):
        assert secret not in json.dumps([created.details, removed.details])


async def test_test_event_is_due_once_a_minute(
    webhooks: WebhookService, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = utc_now()
    monkeypatch.setattr("gateway.accounts.webhooks.service.utc_now", lambda: now)
    webhook = await webhooks.create("acme", URL)
    event = await webhooks.test("acme", webhook.id)
    with pytest.raises(ConflictError, match="already tested in this minute"):
        await webhooks.test("acme", webhook.id)
    ((row, to),) = await _due(database)
    assert row.id == event.id
    assert (to.url, row.attempts) == (URL, 0)
    assert BOX.open(to.sealed_secret or b"") == webhook.secret
    assert webhook.secret not in repr((row, to))
    body = json.loads(row.body)
    assert body == {
        "object": "event",
        "id": event.id,
        "type": "webhook.test",
        "created_at": body["created_at"],
        "tenant": "acme",
        "data": {"webhook": webhook.id},
    }


@every_database
async def test_event_of_the_same_name_is_stored_once(
    webhooks: WebhookService, database: Database
) -> None:
    webhook = await webhooks.create("acme", URL)
    name = EventName(webhook.id, "budget.threshold", "t:acme", "2026-11", 50)

    async def add() -> int:
        async with database.writing() as transaction:
            events = [make_event(name._replace(threshold=t), "acme", {}) for t in (50, 80)]
            return await add_events(transaction, events)

    assert sum(await asyncio.gather(*(add() for _ in range(4)))) == 2
    assert len(await _due(database)) == 2
    async with database.reading() as transaction:
        known = await known_events(transaction, [webhook.id], "budget.threshold", ["2026-11"])
    assert known == {name, name._replace(threshold=80)}


async def test_removed_webhook_gets_no_events(webhooks: WebhookService, database: Database) -> None:
    webhook = await webhooks.create("acme", URL)
    await _add_event(database, webhook)
    await webhooks.remove("acme", webhook.id)
    assert await _due(database) == []
