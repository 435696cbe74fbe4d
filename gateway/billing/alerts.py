"""Webhook alerts for budgets and spend limits that reach a threshold, and for credits that are
almost used up.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from common.tasks import each_apart
from gateway.accounts.webhooks.service import (
    EventName,
    WebhookEvent,
    add_events,
    known_events,
    make_event,
)
from gateway.billing.credits.service import balance_of
from gateway.billing.ledger.store import read_balances
from gateway.limits.seeding import Seeder
from gateway.limits.store import QuotaStore
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import spend_limits_of
from gateway.platform.database.tables import (
    ApiKeyRow,
    CreditRow,
    LedgerRow,
    PlanRow,
    ProjectRow,
    RollupPeriod,
    RollupRow,
    SpendLimitRow,
    TenantRow,
    WebhookRow,
)
from gateway.records.grants import defaults_of
from gateway.records.limits import (
    Bounds,
    Limits,
    LimitScope,
    SpendScope,
    SubjectLimits,
    subject_of,
)
from gateway.records.records import Billing, CreditKind, Plan, ProjectStatus, Tenant, Webhook
from gateway.records.spending import SpendLimit
from gateway.records.times import hour_of, month_start, to_ms, to_time


async def costs_since(
    transaction: AsyncSession, tenant_id: str, since: datetime
) -> Mapping[str, int]:
    """Return what a tenant, its projects and its keys have cost, by subjects such as `t:acme`.

    The days of the ledger lag it by seconds, but have few rows.
    """
    rows = await transaction.execute(
        select(RollupRow.project_id, RollupRow.credential_id, func.sum(RollupRow.cost_micros))
        .where(
            RollupRow.tenant_id == tenant_id,
            RollupRow.period == RollupPeriod.DAY,
            RollupRow.start_at >= since,
        )
        .group_by(RollupRow.project_id, RollupRow.credential_id)
    )
    costs = Counter[str]()
    for project_id, credential_id, cost in rows:
        costs[subject_of(LimitScope.TENANT, tenant_id)] += int(cost)
        costs[subject_of(LimitScope.KEY, credential_id)] += int(cost)
        if project_id:
            costs[subject_of(LimitScope.PROJECT, project_id)] += int(cost)
    return costs


@dataclass(frozen=True, slots=True)
class Watched:
    """A tenant with webhooks."""

    tenant: Tenant
    plan: Plan | None
    webhooks: list[Webhook]


async def _watched(transaction: AsyncSession) -> list[Watched]:
    """Return the tenants that have webhooks."""
    rows = await transaction.execute(
        select(TenantRow, PlanRow, WebhookRow)
        .join(WebhookRow, WebhookRow.tenant_id == TenantRow.id)
        .outerjoin(PlanRow, PlanRow.id == TenantRow.plan_id)
        .where(WebhookRow.removed_at.is_(None))
        .order_by(TenantRow.id, WebhookRow.id)
    )
    found: dict[str, Watched] = {}
    row: Any
    for row in rows:
        tenant, plan, webhook = row
        known = None if plan is None else plan.to_record()
        watched = found.setdefault(tenant.id, Watched(tenant.to_record(), known, []))
        watched.webhooks.append(webhook.to_record())
    return list(found.values())


async def _holders(transaction: AsyncSession, watched: Watched) -> list[SubjectLimits]:
    """Return the limits of a tenant, of its projects and of its keys in use."""
    tenant_id = watched.tenant.id
    is_active = ProjectRow.tenant_id == tenant_id, ProjectRow.status == ProjectStatus.ACTIVE
    projects = select(ProjectRow.id, ProjectRow.limits).where(*is_active).order_by(ProjectRow.id)
    is_in_use = ApiKeyRow.tenant_id == tenant_id, ApiKeyRow.revoked_at.is_(None)
    keys = select(ApiKeyRow.id, ApiKeyRow.limits).where(*is_in_use).order_by(ApiKeyRow.id)
    holders: dict[LimitScope, Iterable[Any]] = {
        LimitScope.TENANT: [(tenant_id, watched.tenant.limits)],
        LimitScope.PROJECT: await transaction.execute(projects),
        LimitScope.KEY: await transaction.execute(keys),
    }
    return [
        SubjectLimits(scope, id_, Limits.from_values(own, defaults_of(watched.plan, scope)))
        for scope, of_scope in holders.items()
        for id_, own in of_scope
    ]


BUDGET_KIND: Final = "budget.threshold"
"""Spending of this month has reached a threshold of the webhook."""
CREDITS_KIND: Final = "credits.exhausted"
"""Less than a hundredth of the newest grant is left.

A request reserves its maximum cost, so the last micro-dollars are rarely spent and the balance
rarely reaches exactly 0.
"""
EXHAUSTED_PARTS: Final = 100
SPEND_LIMIT_KIND: Final = "spend_limit.threshold"
"""Spending in the current window of a spend limit has reached a threshold of the webhook."""
ANOMALY_KIND: Final = "key.anomaly"
"""A key has spent a multiple of what it usually spends, or repeats one request."""
ANOMALY_SHARES: Final = (80,)
"""Percent of an automatic limit: a key that is stopped rarely spends all of it."""
REPEAT_SHARES: Final = (100,)
"""Percent of the equal requests of a key that are allowed; differs from ANOMALY_SHARES."""
MOST_USERS: Final = 10_000
"""End users of a tenant for whom a run looks for events."""
RECENT: Final = timedelta(hours=1)
"""A run looks for events of end users whose requests were admitted this long ago at most."""
HOLDERS_AT_ONCE: Final = 50
"""Holders of spend limits that one script reads: more would delay other commands."""


class Spent(NamedTuple):
    """What a holder of a spend limit has spent in the current window."""

    limit: SpendLimit
    user: str
    """Empty unless it is an end user."""
    bounds: Bounds
    used: int
    """Micro-dollars, or how often the request was sent that is repeated most."""
    is_repeats: bool = False


async def find_alerts(database: Database, quotas: QuotaStore, now: datetime) -> int:
    """Add webhook events for every budget that has reached a threshold in the month of `now`.

    Each webhook receives one event per budget, month and threshold, even if two calls run at once.
    Return the number of new events. One tenant's failure, which is raised at the end, delays no
    other tenant. Raises StoreUnavailableError and RedisError.
    """
    async with database.reading() as transaction:
        watched = await _watched(transaction)
    new = []

    async def add(events: list[WebhookEvent]) -> None:
        if events:
            async with database.writing() as transaction:
                new.append(await add_events(transaction, events))

    async def find(tenant: Watched) -> None:
        async with database.reading() as transaction:
            events = await _budget_events(transaction, tenant, now)
            events += await _credit_events(transaction, tenant)
        await add(events)
        uses = await _uses(database, quotas, tenant, now)
        async with database.reading() as transaction:
            events = await _spend_limit_events(transaction, tenant, uses, now)
        await add(events)

    await each_apart(find, watched, at_once=1)
    return sum(new)


async def _budget_events(
    transaction: AsyncSession, watched: Watched, now: datetime
) -> list[WebhookEvent]:
    tenant_id, month = watched.tenant.id, f"{now:%Y-%m}"
    spent = await costs_since(transaction, tenant_id, month_start(now))
    reached = [
        (name, holder)
        for holder in await _holders(transaction, watched)
        for name in _reached(watched, holder, spent, month=month)
    ]
    if not reached:
        return []
    known = await known_events(
        transaction, [webhook.id for webhook in watched.webhooks], BUDGET_KIND, [month]
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


async def _uses(
    database: Database, quotas: QuotaStore, watched: Watched, now: datetime
) -> list[Spent]:
    """Return what the holders of a tenant's spend limits have spent in the current windows.

    The accounts in Redis have it, so that no ledger row is read for a limit that is in use.
    """
    tenant_id, now_ms = watched.tenant.id, to_ms(now)
    async with database.reading() as transaction:
        found = await spend_limits_of(transaction, SpendLimitRow.tenant_id == tenant_id)
        # An amount of 0 has no usage percentage.
        limits = [each for each in found if each.amount_at(now_ms)]
        repeating = [each for each in found if each.repeats_at(now_ms)]
        users: Sequence[str] = ()
        if not all(each.is_of_one for each in limits):
            users = await _recent_users(transaction, tenant_id, now)
        reported = [each for each in limits if not each.is_enforced]
        costs = await _costs_of_hour(transaction, tenant_id, now) if reported else {}
    uses = [
        Spent(each, "", each.bounds_at(now_ms), costs.get(each.holder or "", 0))
        for each in reported
    ]
    seeder = Seeder(quotas, partial(read_balances, database))
    holders = [
        (each, user)
        for each in limits
        if each.is_enforced
        for user in ([each.holder or ""] if each.is_of_one else users)
    ]
    for start in range(0, len(holders), HOLDERS_AT_ONCE):
        some = holders[start : start + HOLDERS_AT_ONCE]
        subjects = [limit.subject_at(now_ms, user=user) for limit, user in some]
        statuses = await seeder.statuses(tenant_id, subjects)
        uses += (
            Spent(
                limit,
                user if limit.scope is SpendScope.USER else "",
                limit.bounds_at(status.now_ms),
                # What open requests reserve is not spent yet.
                status.cost_this_month - status.reserved_this_month,
            )
            for (limit, user), status in zip(some, statuses, strict=True)
        )
    for start in range(0, len(repeating), HOLDERS_AT_ONCE):
        repeated = repeating[start : start + HOLDERS_AT_ONCE]
        counts = await quotas.most_repeated(tenant_id, repeated)
        uses += (
            Spent(each, "", each.bounds_at(now_ms), count, is_repeats=True)
            for each, count in zip(repeated, counts, strict=True)
        )
    return uses


async def _recent_users(transaction: AsyncSession, tenant_id: str, now: datetime) -> Sequence[str]:
    """Return the end users with the latest requests: only these can have reached a threshold."""
    rows = await transaction.scalars(
        select(LedgerRow.end_user)
        .where(
            LedgerRow.tenant_id == tenant_id,
            LedgerRow.end_user != "",
            LedgerRow.created_at >= now - RECENT,
        )
        .group_by(LedgerRow.end_user)
        .order_by(func.max(LedgerRow.created_at).desc())
        .limit(MOST_USERS)
    )
    return list(rows)


async def _costs_of_hour(
    transaction: AsyncSession, tenant_id: str, now: datetime
) -> Mapping[str, int]:
    """Return the cost of each key in an hour.

    Limits that reject nothing have no accounts. All of them are automatic ones of keys and hours.
    """
    rows = await transaction.execute(
        select(RollupRow.credential_id, func.sum(RollupRow.cost_micros))
        .where(
            RollupRow.tenant_id == tenant_id,
            RollupRow.period == RollupPeriod.HOUR,
            RollupRow.start_at == hour_of(now),
        )
        .group_by(RollupRow.credential_id)
    )
    return {credential_id: int(cost) for credential_id, cost in rows}


async def _spend_limit_events(
    transaction: AsyncSession, watched: Watched, uses: Iterable[Spent], now: datetime
) -> list[WebhookEvent]:
    """Return an event for each threshold that a spend limit has reached in its current window."""
    reached = dict[EventName, dict[str, object]]()
    for limit, user, bounds, used, is_repeats in uses:
        start = to_time(bounds.start * 1000)
        names, most = ("amount_micros", "used_micros"), limit.amount_at(to_ms(now)) or 0
        if is_repeats:
            names, most = ("repeats", "repeated"), limit.repeats or 0
        data = {
            "spend_limit": limit.id,
            "scope": limit.scope,
            "holder": user or limit.holder,
            "model": limit.model,
            "window": limit.window,
            "window_starts_at": start.isoformat(),
            **dict(zip(names, (most, used), strict=True)),
        }
        kind = ANOMALY_KIND if limit.is_automatic else SPEND_LIMIT_KIND
        subject = limit.subject_at(bounds.start * 1000, user=user).subject
        automatic = REPEAT_SHARES if is_repeats else ANOMALY_SHARES
        reached |= {
            EventName(webhook.id, kind, subject, f"{start:%Y-%m-%dT%H:%M}", each): {
                **data,
                "threshold": each,
            }
            for webhook in watched.webhooks
            for each in (automatic if limit.is_automatic else webhook.thresholds)
            if used * 100 >= most * each
        }
    periods, known = {name.period for name in reached}, set[EventName]()
    for kind in {name.kind for name in reached}:
        ids = [webhook.id for webhook in watched.webhooks]
        known |= await known_events(transaction, ids, kind, periods)
    return [
        make_event(name, watched.tenant.id, data)
        for name, data in reached.items()
        if name not in known
    ]


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
    known = await known_events(
        transaction, [webhook.id for webhook in watched.webhooks], CREDITS_KIND, [grant.id]
    )
    missing = [name for name in names if name not in known]
    if not missing:
        return []
    balance = (await balance_of(transaction, tenant.id)).micros
    if balance * EXHAUSTED_PARTS >= grant.amount_micros:
        return []
    data: dict[str, object] = {"balance_micros": balance, "newest_grant": grant.id}
    return [make_event(name, tenant.id, data) for name in missing]
