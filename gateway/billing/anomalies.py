"""Automatic spend limits: a key may neither spend a multiple of what it usually spends in an hour,
nor repeat one request.

A job learns the limits from the hourly sums of the last four weeks. They are spend limits of keys
as any other, so what exceeds them is rejected before it is spent.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import spend_limits_of
from gateway.platform.database.tables import (
    ApiKeyRow,
    RollupPeriod,
    RollupRow,
    SpendLimitRow,
    TenantRow,
)
from gateway.records.limits import MAX_LIMIT, SpendScope, Window
from gateway.records.records import AnomalyAction, Tenant
from gateway.records.spending import SpendLimit, new_limit_id
from gateway.records.times import hour_of, utc_now
from gateway.records.usage_record import MICRO

WEEKS: Final = 4
LEARNING: Final = timedelta(days=7)
"""A key that was first used less than this ago has no limit yet."""
LEAST_MICROS: Final = MICRO
"""The smallest limit: a dollar an hour is no anomaly."""
CHANGED_PARTS: Final = 10
"""A limit stays as it is while it differs from the learned one by less than such a part."""
_BUSY_PART: Final = 0.95
_HOUR: Final = timedelta(hours=1)
_WEEK: Final = timedelta(weeks=1)

Costs = Mapping[datetime, int]
"""Micro-dollars by the beginning of an hour."""


def usual_micros(costs: Costs, hour: datetime) -> int:
    """Return what a key usually spends at most in an hour, by its last four weeks.

    That is the most of the same hour of the week and its neighbours, or what 95 of 100 hours with
    use have cost at most, if that is more: not all work has a timetable.
    """
    same = (
        costs.get(hour - week * _WEEK + beside * _HOUR, 0)
        for week in range(1, WEEKS + 1)
        for beside in (-1, 0, 1)
    )
    recent = sorted(cost for at, cost in costs.items() if hour - WEEKS * _WEEK <= at < hour)
    busy = recent[int(len(recent) * _BUSY_PART)] if recent else 0
    return max(*same, busy)


def learned_micros(costs: Costs, hour: datetime, factor: int) -> int | None:
    """Return the limit of a key in an hour; None if it has too little history."""
    known = [at for at, cost in costs.items() if cost]
    if not known or min(known) > hour - LEARNING:
        return None
    return min(max(factor * usual_micros(costs, hour), LEAST_MICROS), MAX_LIMIT)


async def learn_limits(database: Database, announcer: ChangeAnnouncer, now: datetime) -> int:
    """Set the automatic spend limits of all tenants that want some, and remove others.

    Return how many have changed. Raises StoreUnavailableError.
    """
    changed = 0
    async with database.reading() as transaction:
        tenants = list(
            await transaction.scalars(
                select(TenantRow).where(
                    or_(
                        TenantRow.anomaly_factor.is_not(None),
                        TenantRow.anomaly_repeats.is_not(None),
                    )
                )
            )
        )
        holding = list(
            await transaction.scalars(
                select(SpendLimitRow.tenant_id).where(SpendLimitRow.is_automatic).distinct()
            )
        )
    wanted = {row.id: row.to_record() for row in tenants}
    for tenant_id in sorted({*wanted, *holding}):
        async with database.writing() as transaction:
            number = await _learn(transaction, tenant_id, wanted.get(tenant_id), hour_of(now))
        if number:
            await announcer.tenant_changed(tenant_id)
        changed += number
    return changed


async def _learn(
    transaction: AsyncSession, tenant_id: str, tenant: Tenant | None, hour: datetime
) -> int:
    is_its = SpendLimitRow.tenant_id == tenant_id
    found = await spend_limits_of(transaction, is_its, SpendLimitRow.is_automatic.is_(True))
    known = {each.holder: each for each in found}
    amounts = dict[str, int | None]()
    if tenant is not None:
        amounts = await _amounts(transaction, tenant, hour)
    stale = [each.id for holder, each in known.items() if holder not in amounts]
    if stale:
        await transaction.execute(delete(SpendLimitRow).where(SpendLimitRow.id.in_(stale)))
    number = len(stale)
    is_enforced = tenant is not None and tenant.anomaly_action is AnomalyAction.STOP
    repeats = None if tenant is None else tenant.anomaly_repeats
    for key_id, micros in amounts.items():
        earlier = known.get(key_id)
        if earlier is None:
            limit = _limit_of(tenant_id, key_id, micros, repeats, is_enforced=is_enforced)
            transaction.add(SpendLimitRow.of(limit))
        elif (is_enforced, repeats) != (earlier.is_enforced, earlier.repeats) or _differs(
            micros, earlier.amount_micros
        ):
            await transaction.execute(
                update(SpendLimitRow)
                .where(SpendLimitRow.id == earlier.id)
                .values(amount_micros=micros, repeats=repeats, is_enforced=is_enforced)
            )
        else:
            continue
        number += 1
    return number


async def _amounts(
    transaction: AsyncSession, tenant: Tenant, hour: datetime
) -> dict[str, int | None]:
    """Return the keys of a tenant that have a limit, and the amounts that are learned.

    Revoked keys have none.
    """
    keys: Collection[str] = set(
        await transaction.scalars(
            select(ApiKeyRow.id).where(
                ApiKeyRow.tenant_id == tenant.id, ApiKeyRow.revoked_at.is_(None)
            )
        )
    )
    rows = await transaction.execute(
        select(RollupRow.credential_id, RollupRow.start_at, func.sum(RollupRow.cost_micros))
        .where(
            RollupRow.tenant_id == tenant.id,
            RollupRow.period == RollupPeriod.HOUR,
            RollupRow.start_at >= hour - WEEKS * _WEEK - _HOUR,
            RollupRow.start_at < hour,
        )
        .group_by(RollupRow.credential_id, RollupRow.start_at)
    )
    costs = defaultdict[str, dict[datetime, int]](dict)
    for key_id, start_at, cost in rows:
        if key_id in keys:
            costs[key_id][start_at] = int(cost)
    factor, found = tenant.anomaly_factor, dict[str, int | None]()
    if factor is not None:
        found = {key_id: learned_micros(each, hour, factor) for key_id, each in costs.items()}
    if tenant.anomaly_repeats is not None:
        return dict.fromkeys(keys) | found
    return {key_id: micros for key_id, micros in found.items() if micros is not None}


def _differs(learned: int | None, known: int | None) -> bool:
    if learned is None or known is None:
        return learned is not known
    return abs(learned - known) * CHANGED_PARTS > known


def _limit_of(
    tenant_id: str, key_id: str, micros: int | None, repeats: int | None, *, is_enforced: bool
) -> SpendLimit:
    return SpendLimit(
        id=new_limit_id(),
        tenant_id=tenant_id,
        scope=SpendScope.KEY,
        holder=key_id,
        model=None,
        window=Window.HOUR,
        starts_on=1,
        amount_micros=micros,
        repeats=repeats,
        is_automatic=True,
        is_enforced=is_enforced,
        created_at=utc_now(),
    )
