"""Webhook delivery: signed, at least once, retried for about a day."""

import hashlib
import hmac
import logging
from collections.abc import Collection
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import and_, join
from sqlalchemy.ext.asyncio import AsyncSession

from common import clock
from gateway.accounts.webhooks.secret_box import SealedSecretError, SecretBox
from gateway.accounts.webhooks.service import MAILTO
from gateway.jobs.mail import Mailer
from gateway.jobs.outbound import DeliveryError, Outbound
from gateway.platform.database.claims import Claim, LostClaimError, Slots, claiming, lock_in_turns
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import WebhookEventRow, WebhookRow
from gateway.records.times import utc_now

AT_ONCE: Final = 20
"""Events that are sent concurrently."""
MOST: Final = (8, 4)
"""Events of one tenant, and to one URL of it, that are sent concurrently."""
FIRST_PAUSE: Final = timedelta(seconds=30)
"""Pause before the second attempt; each further pause is twice as long."""
LONGEST_PAUSE: Final = timedelta(hours=4)
GIVE_UP_AFTER: Final = timedelta(hours=24)

MAX_ERROR_CHARACTERS: Final = 200

logger = logging.getLogger(__name__)


class WebhookSender(Slots[tuple[WebhookEventRow, Claim]]):
    """Sends due events."""

    def __init__(
        self, database: Database, outbound: Outbound, box: SecretBox, mailer: Mailer | None = None
    ) -> None:
        claim = claiming(database, WebhookEventRow.next_attempt_at, lock_due)
        super().__init__(AT_ONCE, claim, self._send)
        self._database = database
        self._box = box
        self._outbound = outbound
        self._mailer = mailer

    async def _send(self, item: tuple[WebhookEventRow, Claim]) -> bool:
        event, claim = item
        async with self._database.reading() as transaction:
            webhook = await transaction.get_one(WebhookRow, event.webhook_id)
        reason = ""
        try:
            await self._deliver(webhook, event)
        except (DeliveryError, SealedSecretError) as error:
            reason = str(error)
        except Exception:
            logger.exception("webhook event %s cannot be sent", event.id)
            reason = "could not be sent by an internal error"
        now, next_at = utc_now(), None
        if reason:
            pause = min(FIRST_PAUSE * 2 ** min(event.attempts, 30), LONGEST_PAUSE)
            next_at = now + pause
            if next_at - event.created_at > GIVE_UP_AFTER:
                logger.warning("webhook event %s is abandoned: %s", event.id, reason)
                next_at = None
        with suppress(LostClaimError):  # The process was slow, and another one sends it again.
            await claim.change(
                delivered_at=None if reason else now,
                next_attempt_at=next_at,
                attempts=event.attempts + 1,
                last_error=reason[:MAX_ERROR_CHARACTERS],
            )
        return not reason

    async def _deliver(self, webhook: WebhookRow, event: WebhookEventRow) -> None:
        if webhook.url.startswith(MAILTO):
            if self._mailer is None:
                raise DeliveryError("this deployment sends no mail any more")
            await self._mailer.send(webhook.url, event.body)
            return
        sealed, body = webhook.sealed_secret, event.body.encode()
        secret = webhook.secret if sealed is None else self._box.open(sealed)
        await self._outbound.post(webhook.url, body, _headers(event.id, body, secret))


async def lock_due(
    transaction: AsyncSession, now: datetime, limit: int, held: Collection[str] = ()
) -> list[WebhookEventRow]:
    """Lock due events, in turns of tenants and of their URLs; see `claiming`."""
    return await lock_in_turns(
        transaction,
        WebhookEventRow,
        is_due=and_(
            WebhookEventRow.delivered_at.is_(None),
            WebhookEventRow.next_attempt_at <= now,
            WebhookRow.removed_at.is_(None),
        ),
        is_held=WebhookEventRow.id.in_(held),
        owners=(WebhookRow.tenant_id, WebhookRow.url),
        order=WebhookEventRow.next_attempt_at,
        limit=limit,
        most=MOST,
        source=join(WebhookEventRow, WebhookRow),
    )


def signature(secret: str, body: bytes, unix_seconds: int) -> str:
    """Return the header `sluice-signature`: its time, and an HMAC-SHA-256 of time and body."""
    signed = str(unix_seconds).encode() + b"." + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    return f"t={unix_seconds},v1={digest}"


def _headers(event_id: str, body: bytes, secret: str) -> dict[str, str]:
    return {
        "content-type": "application/json",
        "user-agent": "sluice-webhooks",
        "sluice-event-id": event_id,
        "sluice-signature": signature(secret, body, clock.now_seconds()),
    }
