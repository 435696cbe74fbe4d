"""Grants and plans for changes, and their results: audit rows and announcements."""

from typing import Any

from redis.asyncio import Redis

from contract.keys import KEY_EVENTS
from gateway.accounts.audit.log import AuditEntryBody, AuditLog, AuditService
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import PlanRow
from gateway.records.grants import BOUNDS, Grant
from gateway.records.limits import Limits, LimitScope
from gateway.records.scopes import TENANT_SCOPES
from gateway.records.times import utc_now


def grant(*, is_operator: bool = False, **bounds: Any) -> Grant:
    """Return the rights of a tenant's credential with these bounds only."""
    unbound = dict.fromkeys(BOUNDS) | {"scopes": TENANT_SCOPES, "limits": Limits()}
    return Grant(credential_id="key_caller", bounds=unbound | bounds, is_operator=is_operator)


def plan_row(plan_id: str) -> PlanRow:
    """Return a plan without limits."""
    limits: dict[str, Any] = {f"{scope}_limits": {} for scope in LimitScope}
    return PlanRow(id=plan_id, name=plan_id, created_at=utc_now(), **limits)


async def add_plan(database: Database, plan_id: str) -> None:
    """Add a plan without limits."""
    async with database.writing() as transaction:
        transaction.add(plan_row(plan_id))


async def audited(database: Database) -> list[AuditEntryBody]:
    """Return the audit log, oldest first, after a check of its chain."""
    assert (await AuditService(database).verify()).broken_at is None
    async with database.reading() as transaction:
        return (await AuditLog(transaction).entries())[::-1]


async def announced(redis: Redis) -> list[dict[bytes, bytes]]:
    """Return the announcements to gateways, oldest first."""
    entries: Any = await redis.xrange(KEY_EVENTS)
    return [fields for _, fields in entries]
