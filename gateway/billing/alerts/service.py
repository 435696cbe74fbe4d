"""Webhook alerts for budgets that reach a threshold and for credits that are almost used up."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from common.tasks import each_apart
from gateway.accounts.webhooks.service import EventName, WebhookEvent, WebhookStore, make_event
from gateway.billing.alerts.store import AlertStore, MonthlyCosts, RollupCosts, Watched
from gateway.billing.credits.service import balance_of
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import CreditRow
from gateway.records.limits import LimitScope, SubjectLimits, subject_of
from gateway.records.records import Billing, CreditKind

BUDGET_KIND: Final = "budget.threshold"
"""Spending of this month has reached a threshold of the webhook."""
CREDITS_KIND: Final = "credits.exhausted"
"""Less than a hundredth of the newest grant is left.

A request reserves its maximum cost, so the last micro-dollars are rarely spent and the balance
rarely reaches exactly 0.
"""
EXHAUSTED_PARTS: Final = 100


async def find_alerts(
    database: Database, now: datetime, *, costs: MonthlyCosts | None = None
) -> int:
    """Add webhook events for every budget that has reached a threshold in the month of `now`.

    Each webhook receives one event per budget, month and threshold, even if two calls run at once.
    Return the number of new events. One tenant's failure, which is raised at the end, delays no
    other tenant. Raises StoreUnavailableError.
    """
    async with database.reading() as transaction:
        watched = await AlertStore(transaction).watched()
    new = []

    async def find(tenant: Watched) -> None:
        async with database.reading() as transaction:
            events = [
                *await _budget_events(transaction, tenant, now, costs=costs or RollupCosts()),
                *await _credit_events(transaction, tenant),
            ]
        if events:
            async with database.writing() as transaction:
                new.append(await WebhookStore(transaction).add_events(events))

    await each_apart(find, watched, at_once=1)
    return sum(new)


async def _budget_events(
    transaction: AsyncSession, watched: Watched, now: datetime, *, costs: MonthlyCosts
) -> list[WebhookEvent]:
    tenant_id, month = watched.tenant.id, f"{now:%Y-%m}"
    month_start = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    spent = await costs.costs(transaction, tenant_id, month_start)
    reached = [
        (name, holder)
        for holder in await AlertStore(transaction).holders(watched)
        for name in _reached(watched, holder, spent, month=month)
    ]
    if not reached:
        return []
    known = await WebhookStore(transaction).known_events(
        [webhook.id for webhook in watched.webhooks], BUDGET_KIND, [month]
    )
    return [
        make_event(name, tenant_id, _budget_data(name, holder, spent))
        for name, holder in reached
        if name not in known
    ]


def _reached(
    watched: Watched, holder: SubjectLimits, spent: Mapping[str, int], *, month: str
) -> Iterator[EventName]:
    """Yield an event for each threshold that the holder's budget has reached."""
    budget = holder.limits.budget_micros
    # A budget of 0 has no usage percentage.
    if not budget:
        return
    used = spent.get(holder.subject, 0)
    for webhook in watched.webhooks:
        for threshold in webhook.thresholds:
            if used * 100 >= budget * threshold:
                yield EventName(webhook.id, BUDGET_KIND, holder.subject, month, threshold)


def _budget_data(
    name: EventName, holder: SubjectLimits, spent: Mapping[str, int]
) -> dict[str, object]:
    return {
        "scope": holder.scope,
        "id": holder.id,
        "month": name.period,
        "threshold": name.threshold,
        "budget_micros": holder.limits.budget_micros,
        "used_micros": spent.get(holder.subject, 0),
    }


async def _credit_events(transaction: AsyncSession, watched: Watched) -> list[WebhookEvent]:
    tenant = watched.tenant
    if tenant.billing is not Billing.PREPAID:
        return []
    grants = select(CreditRow).where(
        CreditRow.tenant_id == tenant.id, CreditRow.kind == CreditKind.GRANT
    )
    newest = grants.order_by(CreditRow.created_at.desc(), CreditRow.id.desc()).limit(1)
    grant = await transaction.scalar(newest)
    if grant is None:
        return []
    names = [
        EventName(webhook.id, CREDITS_KIND, subject_of(LimitScope.TENANT, tenant.id), grant.id, 100)
        for webhook in watched.webhooks
    ]
    known = await WebhookStore(transaction).known_events(
        [webhook.id for webhook in watched.webhooks], CREDITS_KIND, [grant.id]
    )
    missing = [name for name in names if name not in known]
    if not missing:
        return []
    balance = (await balance_of(transaction, tenant.id)).micros
    if balance * EXHAUSTED_PARTS >= grant.amount_micros:
        return []
    data: dict[str, object] = {"balance_micros": balance, "newest_grant": grant.id}
    return [make_event(name, tenant.id, data) for name in missing]
