"""The unit of work: what a change leaves and announces if it succeeds, and if it fails."""

from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.changes import changing
from gateway.platform.changes import ChangeAnnouncer
from gateway.platform.database.engine import Database
from gateway.platform.database.paging import list_records
from gateway.platform.database.tables import PlanRow
from gateway.records.errors import ConflictError
from gateway.records.records import Plan
from tests.gateway.accounts.changes import announced, audited, plan_row
from tests.support.cases import case
from tests.support.kinds import every_database

BROKEN_COMMIT = {
    # The constraint is checked at the end of the transaction.
    "sqlite": (
        "PRAGMA defer_foreign_keys = ON",
        (
            "INSERT INTO members (id, tenant_id, subject, name, role, created_at)"
            " VALUES ('mbr_1', 'missing', 'ada', 'Ada', 'owner', '2026-01-01')"
        ),
    ),
    "postgresql": (
        (
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql"
            " AS $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '23000'; END $$"
        ),
        (
            "CREATE CONSTRAINT TRIGGER refuses AFTER UPDATE ON plans DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION refuse()"
        ),
        "UPDATE plans SET name = 'other'",
    ),
}


async def _fail(_transaction: AsyncSession) -> None:
    raise KeyError


async def _break_commit(transaction: AsyncSession) -> None:
    for statement in BROKEN_COMMIT[transaction.get_bind().dialect.name]:
        await transaction.execute(text(statement))


async def _succeed(_transaction: AsyncSession) -> None:
    """Change nothing more."""


@every_database
async def test_change_is_saved_audited_and_announced_or_nothing_of_it(
    database: Database, redis: Redis
) -> None:
    announcer = ChangeAnnouncer(redis)
    seen_by_others = list[list[Plan]]()

    async def look() -> None:
        async with database.reading() as transaction:
            seen_by_others.append(await list_records(transaction, PlanRow))

    async def change(plan_id: str, end: Callable[[AsyncSession], Awaitable[None]]) -> None:
        async with changing(database, "acme", actor="cli:ada", conflict="It exists.") as change:
            await change.insert(plan_row(plan_id))
            await change.audit("plan.create", plan_id, {"name": plan_id})
            change.announce(look)
            change.announce(announcer.tenant_changed, "acme")
            await end(change.transaction)

    await change("first", _succeed)
    for end, error in ((_fail, KeyError), (_break_commit, ConflictError)):
        with case(error), pytest.raises(error):
            await change("second", end)
    with pytest.raises(ConflictError, match=r"^It exists\.$"):
        await change("first", _succeed)
    await change("third", _succeed)
    # Nothing is announced before others see the change.
    assert [[plan.id for plan in plans] for plans in seen_by_others] == [
        ["first"],
        ["first", "third"],
    ]
    assert await announced(redis) == [{b"tenant": b"acme"}] * 2
    # `audited` verifies that the failures leave no gap.
    rows = [(row.action, row.actor, row.tenant, row.subject) for row in await audited(database)]
    assert rows == [
        ("plan.create", "cli:ada", "acme", "first"),
        ("plan.create", "cli:ada", "acme", "third"),
    ]
