"""Webhooks: URLs that receive events about a tenant's budgets, and their events."""

import logging
import secrets
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import changing
from gateway.accounts.tenants.service import reading_of_tenant
from gateway.accounts.webhooks.secret_box import SealedSecretError, SecretBox
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import find_record, list_records
from gateway.platform.database.tables import WebhookEventRow, WebhookRow
from gateway.platform.outbound.addresses import DEFAULT_PORTS, HTTPS_PORTS, looks_public, split_url
from gateway.platform.settings import Settings
from gateway.records.checks import check_known, checked_email
from gateway.records.errors import ConflictError, InvalidParameterError, NotFoundError, must, shown
from gateway.records.limits import LimitScope, subject_of
from gateway.records.records import Webhook
from gateway.records.times import utc_now

MAX_URL_CHARACTERS: Final = 2000


MAILTO: Final = "mailto:"


def check_url(url: str, *, allows_private: bool, allows_mail: bool = False) -> None:
    """Reject anything but absolute http(s) URLs and, if allowed, `mailto:` and an address.

    By default it allows only https to usual ports of public hosts. Raises InvalidParameterError,
    which omits the URL because it may contain a secret.
    """
    if url.startswith(MAILTO):
        _check_address(url.removeprefix(MAILTO), allows_mail=allows_mail)
        return
    parts = split_url(url, most_characters=MAX_URL_CHARACTERS)
    if parts is None or parts.hostname is None:
        raise _refusal("must be an absolute URL such as https://example.com/hooks")
    if parts.username is not None or parts.password is not None:
        raise _refusal("must not contain a user name or password")
    if parts.fragment:
        raise _refusal("must not have a fragment (#...)")
    if allows_private:
        return
    if parts.scheme != "https":
        raise _refusal("must begin with https://")
    if not looks_public(parts.hostname):
        raise _refusal("must have a host on the public internet")
    if (parts.port or DEFAULT_PORTS["https"]) not in HTTPS_PORTS:
        ports = " or ".join(map(str, HTTPS_PORTS))
        raise _refusal(f"must use port {ports}. Given: {parts.port}")


def _check_address(address: str, *, allows_mail: bool) -> None:
    if not allows_mail:
        raise _refusal("must not be an address: this deployment sends no mail")
    if checked_email(address, param="url") != address:
        raise _refusal("must have an address in lower case")


def host_of(url: str) -> str:
    """Return the host of a checked URL with its port, if it has one, or an address's domain."""
    return url.rpartition("@")[2] if url.startswith(MAILTO) else urlsplit(url).netloc


def _refusal(why: str) -> InvalidParameterError:
    return InvalidParameterError(f"'url' {why}.", param="url")


class EventName(NamedTuple):
    """Identity of an event: a webhook receives each event once."""

    webhook_id: str
    kind: str
    """For example `budget.threshold`."""
    subject: str
    """Holder of the budget: `t:acme`, `p:prj_1`, `k:key_1`."""
    period: str
    """For example the month `2026-11`."""
    threshold: int
    """Percentage; 0 if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookEvent:
    """An event for a webhook."""

    id: str
    name: EventName
    body: str
    """Body of the request: JSON."""
    created_at: datetime


async def add_events(transaction: AsyncSession, events: Sequence[WebhookEvent]) -> int:
    """Add events for delivery, except those with an existing name. Return how many are new."""
    if not events:
        return 0
    dialect = transaction.get_bind().dialect.name
    insert = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(WebhookEventRow)
    added = await transaction.scalars(
        insert.on_conflict_do_nothing().returning(WebhookEventRow.id),
        # Sorted, so that two transactions that add the same events wait for each other without
        # deadlock.
        [_row(event) for event in sorted(events, key=lambda event: event.name)],
    )
    return len(list(added))


async def known_events(
    transaction: AsyncSession, webhook_ids: Collection[str], kind: str, periods: Collection[str]
) -> set[EventName]:
    """Return the names of existing events of these webhooks."""
    rows = await transaction.execute(
        select(*(getattr(WebhookEventRow, name) for name in EventName._fields)).where(
            WebhookEventRow.webhook_id.in_(webhook_ids),
            WebhookEventRow.kind == kind,
            WebhookEventRow.period.in_(periods),
        )
    )
    return {EventName(*row) for row in rows}


def _row(event: WebhookEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        **event.name._asdict(),
        "body": event.body,
        "created_at": event.created_at,
        "attempts": 0,
        "next_attempt_at": event.created_at,
        "last_error": "",
    }


MAX_WEBHOOKS: Final = 5
"""Maximum number per tenant."""
MAX_THRESHOLDS: Final = 10
DEFAULT_THRESHOLDS: Final = (50, 80, 100)
TEST_KIND: Final = "webhook.test"
AT_ONCE: Final = 100
"""Webhooks whose secrets one transaction encrypts."""

_SECRET_BYTES = 32

logger = logging.getLogger(__name__)


class WebhookService:
    """Registers webhooks.

    Args:
        database: stores the webhooks.
        box: encrypts their secrets.
        allows_private: whether URLs may use plain http and private addresses.
        allows_mail: whether a URL may be `mailto:` and an address.
    """

    def __init__(
        self,
        database: Database,
        box: SecretBox,
        *,
        allows_private: bool = False,
        allows_mail: bool = False,
    ) -> None:
        self._database = database
        self._box = box
        self._allows_private = allows_private
        self._allows_mail = allows_mail

    @classmethod
    def of(cls, settings: Settings, database: Database) -> "WebhookService":
        """Return the webhooks of a deployment."""
        box = SecretBox(settings.plain_encryption_keys())
        return cls(
            database,
            box,
            allows_private=settings.webhook_allow_private,
            allows_mail=settings.smtp_url is not None,
        )

    async def create(
        self,
        tenant_id: str,
        url: str,
        *,
        thresholds: Sequence[int] = DEFAULT_THRESHOLDS,
        actor: str = SYSTEM,
    ) -> Webhook:
        """Register a URL (see `WebhookCreation`). Its secret may be shown only this once."""
        check_known(tenant_id, "tenant")
        check_url(url, allows_private=self._allows_private, allows_mail=self._allows_mail)
        _check_thresholds(thresholds)
        secret = f"whsec_{secrets.token_hex(_SECRET_BYTES)}"
        sealed_secret = self._box.seal(secret)
        webhook = Webhook(
            id=f"whk_{secrets.token_hex(8)}",
            tenant_id=tenant_id,
            url=url,
            thresholds=tuple(sorted(thresholds)),
            created_at=utc_now(),
            secret=secret,
        )
        async with changing(self._database, tenant_id, actor=actor, is_locked=True) as change:
            if len(await webhooks_of(change.transaction, tenant_id)) >= MAX_WEBHOOKS:
                raise ConflictError(
                    f"The tenant {shown(tenant_id)} already has {MAX_WEBHOOKS} webhooks, "
                    "the maximum. Remove one first."
                )
            row = WebhookRow(**asdict(webhook) | {"secret": "", "sealed_secret": sealed_secret})
            await change.insert(row)
            await change.audit("webhook.create", webhook.id, _details(webhook))
        return webhook

    async def list_of_tenant(self, tenant_id: str) -> list[Webhook]:
        """Return the tenant's webhooks, oldest first."""
        async with reading_of_tenant(self._database, tenant_id) as transaction:
            return await webhooks_of(transaction, tenant_id)

    async def get(self, tenant_id: str, webhook_id: str) -> Webhook:
        """Return the tenant's webhook."""
        _check_ids(tenant_id, webhook_id)
        async with self._database.reading() as transaction:
            return await _find(transaction, tenant_id, webhook_id)

    async def events(self, tenant_id: str, webhook_id: str, *, limit: int) -> list[WebhookEventRow]:
        """Return the newest events of the webhook with the states of their delivery."""
        _check_ids(tenant_id, webhook_id)
        events = select(WebhookEventRow).where(WebhookEventRow.webhook_id == webhook_id)
        newest = events.order_by(WebhookEventRow.created_at.desc(), WebhookEventRow.id.desc())
        async with self._database.reading() as transaction:
            await _find(transaction, tenant_id, webhook_id)
            return list(await transaction.scalars(newest.limit(limit)))

    async def remove(self, tenant_id: str, webhook_id: str, *, actor: str = SYSTEM) -> None:
        """Remove the webhook, which then receives no more events."""
        _check_ids(tenant_id, webhook_id)
        async with changing(self._database, tenant_id, actor=actor, is_locked=True) as change:
            webhook = await _find(change.transaction, tenant_id, webhook_id)
            await change.set(WebhookRow, WebhookRow.id == webhook_id, {"removed_at": utc_now()})
            await change.audit("webhook.remove", webhook_id, _details(webhook))

    async def test(self, tenant_id: str, webhook_id: str) -> WebhookEvent:
        """Send a test event to the webhook; at most one per minute."""
        _check_ids(tenant_id, webhook_id)
        now = utc_now()
        name = EventName(
            webhook_id,
            TEST_KIND,
            subject_of(LimitScope.TENANT, tenant_id),
            f"{now:%Y-%m-%dT%H:%M}",
            0,
        )
        event = make_event(name, tenant_id, {"webhook": webhook_id})
        async with self._database.writing() as transaction:
            await _find(transaction, tenant_id, webhook_id)
            if await add_events(transaction, [event]) == 0:
                raise ConflictError("This webhook was already tested in this minute.")
            # Only the last test is kept, so that tests do not fill the table.
            await transaction.execute(
                delete(WebhookEventRow).where(
                    WebhookEventRow.webhook_id == webhook_id,
                    WebhookEventRow.kind == TEST_KIND,
                    WebhookEventRow.created_at < now,
                )
            )
        return event


async def encrypt_secrets(database: Database, box: SecretBox) -> int:
    """Encrypt the secrets of all webhooks with the first key. Return how many were not.

    Two calls may run at once. Without a key nothing happens. Raises StoreUnavailableError.
    """
    changed, after, more = 0, "", box.has_key
    while more:
        async with database.writing() as transaction:
            part = select(WebhookRow).where(WebhookRow.id > after).order_by(WebhookRow.id)
            rows = await transaction.scalars(part.limit(AT_ONCE).with_for_update())
            found = rows.all()
            for row in found:
                if (sealed := _sealed_again(row, box)) is not None:
                    row.secret, row.sealed_secret = "", sealed
                    changed += 1
        more = len(found) == AT_ONCE
        after = found[-1].id if found else after
    return changed


def _sealed_again(row: WebhookRow, box: SecretBox) -> bytes | None:
    """Return a secret encrypted with the first key.

    Return None if it already is, or if no key decrypts it.
    """
    if row.sealed_secret is None:
        return box.seal(row.secret)
    if box.is_current(row.sealed_secret):
        return None
    try:
        return box.seal(box.open(row.sealed_secret))
    except SealedSecretError as error:
        logger.warning("cannot encrypt the secret of webhook %s: %s", row.id, error)
        return None


def make_event(name: EventName, tenant_id: str, data: dict[str, object]) -> WebhookEvent:
    """Return an event in the form in which it is sent."""
    event_id, now = f"evt_{secrets.token_hex(8)}", utc_now()
    body = {
        "object": "event",
        "id": event_id,
        "type": name.kind,
        "created_at": now,
        "tenant": tenant_id,
        "data": data,
    }
    return WebhookEvent(
        id=event_id, name=name, body=msgspec.json.encode(body).decode(), created_at=now
    )


async def _find(transaction: AsyncSession, tenant_id: str, webhook_id: str) -> Webhook:
    is_it = WebhookRow.id == webhook_id
    webhook = await find_record(transaction, WebhookRow, is_it, *_live(tenant_id))
    if webhook is None:
        raise NotFoundError(f"The tenant {shown(tenant_id)} has no webhook {shown(webhook_id)}.")
    return webhook


async def webhooks_of(transaction: AsyncSession, tenant_id: str) -> list[Webhook]:
    """Return the tenant's webhooks, oldest first."""
    return await list_records(transaction, WebhookRow, *_live(tenant_id))


def _live(tenant_id: str) -> tuple[ColumnElement[bool], ...]:
    return WebhookRow.tenant_id == tenant_id, WebhookRow.removed_at.is_(None)


def _details(webhook: Webhook) -> dict[str, Any]:
    # Only the host of the URL: its path or query may contain a secret of the receiver.
    return {"host": host_of(webhook.url), "thresholds": list(webhook.thresholds)}


def _check_ids(tenant_id: str, webhook_id: str) -> None:
    check_known(tenant_id, "tenant")
    check_known(webhook_id, "webhook")


def _check_thresholds(thresholds: Sequence[int]) -> None:
    if not 0 < len(thresholds) <= MAX_THRESHOLDS or len(set(thresholds)) < len(thresholds):
        raise must(
            "thresholds", f"be 1 to {MAX_THRESHOLDS} different percentages", list(thresholds)
        )
    if not all(1 <= threshold <= 100 for threshold in thresholds):
        raise must("thresholds", "be percentages from 1 to 100", list(thresholds))
