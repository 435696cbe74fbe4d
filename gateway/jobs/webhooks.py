"""Webhook delivery: signed, at least once, retried for about a day."""

import hashlib
import hmac
import logging
from collections.abc import Collection
from datetime import timedelta
from typing import Final

from contract import clock
from gateway.database.claims import Slots
from gateway.database.engine import Database
from gateway.jobs.outbound import DeliveryError, Outbound
from gateway.management.webhooks.secret_box import SealedSecretError, SecretBox
from gateway.management.webhooks.store import Delivery, WebhookStore
from gateway.tenancy.times import utc_now

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
        try:
            headers = _headers(delivery, self._secret(delivery))
            await self._outbound.post(delivery.url, delivery.body.encode(), headers)
        except (DeliveryError, SealedSecretError) as error:
            await self._failed(delivery, str(error))
            return False
        except Exception:
            logger.exception("webhook event %s cannot be sent", delivery.event_id)
            await self._failed(delivery, "could not be sent by an internal error")
            return False
        async with self._database.writing() as transaction:
            await WebhookStore(transaction).delivered(delivery.event_id, utc_now())
        return True

    def _secret(self, delivery: Delivery) -> str:
        sealed = delivery.sealed_secret
        return delivery.plain_secret if sealed is None else self._box.open(sealed)

    async def _failed(self, delivery: Delivery, why: str) -> None:
        now = utc_now()
        pause = min(FIRST_PAUSE * 2 ** min(delivery.attempts, 30), LONGEST_PAUSE)
        gives_up = now + pause - delivery.created_at > GIVE_UP_AFTER
        if gives_up:
            logger.warning("webhook event %s is abandoned: %s", delivery.event_id, why)
        async with self._database.writing() as transaction:
            await WebhookStore(transaction).failed(
                delivery.event_id, next_attempt_at=None if gives_up else now + pause, error=why
            )


def signature(secret: str, body: bytes, unix_seconds: int) -> str:
    """Return the header `sluice-signature`: its time, and an HMAC-SHA-256 of time and body."""
    signed = str(unix_seconds).encode() + b"." + body
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    return f"t={unix_seconds},v1={digest}"


def _headers(delivery: Delivery, secret: str) -> dict[str, str]:
    return {
        "content-type": "application/json",
        "user-agent": "sluice-webhooks",
        "sluice-event-id": delivery.event_id,
        "sluice-signature": signature(secret, delivery.body.encode(), clock.now_seconds()),
    }
