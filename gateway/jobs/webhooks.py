"""Webhook delivery: signed, at least once, retried for about a day."""

import hashlib
import hmac
import logging
from collections.abc import Collection
from datetime import timedelta
from typing import Final

from common import clock
from gateway.accounts.webhooks.secret_box import SealedSecretError, SecretBox
from gateway.accounts.webhooks.store import Delivery, WebhookStore
from gateway.jobs.outbound import DeliveryError, Outbound
from gateway.platform.database.claims import Slots
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import WebhookEventRow
from gateway.records.times import utc_now

AT_ONCE: Final = 20
"""Events that are sent concurrently."""
MOST: Final = (8, 4)
"""Events of one tenant, and to one URL of it, that are sent concurrently."""
FIRST_PAUSE: Final = timedelta(seconds=30)
"""Pause before the second attempt; each further pause is twice as long."""
LONGEST_PAUSE: Final = timedelta(hours=4)
GIVE_UP_AFTER: Final = timedelta(hours=24)

logger = logging.getLogger(__name__)


class WebhookSender:
    """Sends due events."""

    def __init__(self, database: Database, outbound: Outbound, box: SecretBox) -> None:
        self._database = database
        self._box = box
        self._outbound = outbound
        self._slots = Slots(AT_ONCE, self._claim, self._send)

    async def run(self, *, seconds: float = 40.0) -> int:
        """Send events until none is due or `seconds` are over. Return how many were delivered.

        Raises StoreUnavailableError.
        """
        return await self._slots.run(seconds=seconds)

    async def aclose(self) -> None:
        """End all attempts. Their events are due again when their claims have expired."""
        await self._slots.aclose()

    async def _claim(self, limit: int, held: Collection[str]) -> dict[str, Delivery]:
        async with self._database.writing() as transaction:
            return await WebhookStore(transaction).due(utc_now(), limit, held=held, most=MOST)

    async def _send(self, delivery: Delivery) -> bool:
        event, webhook = delivery
        try:
            sealed, body = webhook.sealed_secret, event.body.encode()
            secret = webhook.secret if sealed is None else self._box.open(sealed)
            await self._outbound.post(webhook.url, body, _headers(event.id, body, secret))
        except (DeliveryError, SealedSecretError) as error:
            await self._failed(event, str(error))
            return False
        except Exception:
            logger.exception("webhook event %s cannot be sent", event.id)
            await self._failed(event, "could not be sent by an internal error")
            return False
        async with self._database.writing() as transaction:
            await WebhookStore(transaction).delivered(event.id, utc_now())
        return True

    async def _failed(self, event: WebhookEventRow, why: str) -> None:
        now = utc_now()
        pause = min(FIRST_PAUSE * 2 ** min(event.attempts, 30), LONGEST_PAUSE)
        gives_up = now + pause - event.created_at > GIVE_UP_AFTER
        if gives_up:
            logger.warning("webhook event %s is abandoned: %s", event.id, why)
        async with self._database.writing() as transaction:
            await WebhookStore(transaction).failed(
                event.id, next_attempt_at=None if gives_up else now + pause, error=why
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
