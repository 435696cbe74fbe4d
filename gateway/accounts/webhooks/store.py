"""Events of webhooks: added once, claimed, delivered or failed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import and_, join, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.claims import lock_in_turns
from gateway.platform.database.tables import WebhookEventRow, WebhookRow


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


class WebhookStore:
    """Events of webhooks, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    async def add_events(self, events: Sequence[WebhookEvent]) -> int:
        """Add events for delivery, except those with an existing name. Return how many are new."""
        if not events:
            return 0
        dialect = self._transaction.get_bind().dialect.name
        insert = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(WebhookEventRow)
        added = await self._transaction.scalars(
            insert.on_conflict_do_nothing().returning(WebhookEventRow.id),
            # Sorted, so that two transactions that add the same events wait for each other without
            # deadlock.
            [_row(event) for event in sorted(events, key=lambda event: event.name)],
        )
        return len(list(added))

    async def known_events(
        self, webhook_ids: Collection[str], kind: str, periods: Collection[str]
    ) -> set[EventName]:
        """Return the names of existing events of these webhooks."""
        rows = await self._transaction.execute(
            select(
                WebhookEventRow.webhook_id,
                WebhookEventRow.kind,
                WebhookEventRow.subject,
                WebhookEventRow.period,
                WebhookEventRow.threshold,
            ).where(
                WebhookEventRow.webhook_id.in_(webhook_ids),
                WebhookEventRow.kind == kind,
                WebhookEventRow.period.in_(periods),
            )
        )
        return {EventName(*row) for row in rows}

    async def lock_due(
        self, now: datetime, limit: int, *, held: Collection[str] = (), most: Sequence[int] = ()
    ) -> list[WebhookEventRow]:
        """Lock due events with their webhooks, in turns of tenants and of their URLs.

        Args:
            now: the time at which they are due.
            limit: the most events to return.
            held: the ids of those that this process is sending.
            most: the most events of a tenant, and to one URL of it, that it sends at once.
        """
        return await lock_in_turns(
            self._transaction,
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
            most=most,
            source=join(WebhookEventRow, WebhookRow),
        )


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
