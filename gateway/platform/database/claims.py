"""Locks until the end of a transaction, and claims, which outlast it.

A claim is a row that one process works on until a time, chosen in turns of those who own the rows.
It is committed before the work begins. The work renews it, and ends it with its result or, to be
repeated, with the time of the next attempt. The claim of a dead process expires.

SQLite runs only one writing transaction at a time anyway, without locks.
"""

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import ColumnElement, FromClause, and_, false, func, inspect, not_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from common.tasks import end_task
from gateway.platform.database.engine import Database
from gateway.platform.database.tables import Table, TenantRow
from gateway.records.errors import NotFoundError, StoreUnavailableError, shown
from gateway.records.times import utc_now


async def lock_kind(transaction: AsyncSession, key: int) -> None:
    """Block other callers with the same key."""
    if transaction.get_bind().dialect.name == "postgresql":
        await transaction.execute(select(func.pg_advisory_xact_lock(key)))


async def lock_tenant(transaction: AsyncSession, tenant_id: str) -> None:
    """Block other callers for the same tenant. Raises NotFoundError if it does not exist."""
    # FOR NO KEY UPDATE: other transactions may still add rows that refer to the tenant.
    found = await transaction.scalar(
        select(TenantRow.id).where(TenantRow.id == tenant_id).with_for_update(key_share=True)
    )
    if found is None:
        raise NotFoundError(f"There is no tenant {shown(tenant_id)}.")


CLAIM: Final = timedelta(seconds=60)
"""How long a row is claimed: longer than a short attempt. A long one renews its claim."""
TURN_SECONDS: Final = 1.0
"""How long a run claims items and waits for the work on them, which may outlast it."""
LOOK_SECONDS: Final = 0.5
"""Longest time for which a free slot waits for a due item while other items run."""

Row = TypeVar("Row", bound=Table)
Item = TypeVar("Item")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

_ORDER: Final = "claim_order"
_TURN: Final = "claim_turn"


async def lock_in_turns(
    transaction: AsyncSession,
    table: type[Row],
    *,
    is_due: ColumnElement[bool],
    is_held: ColumnElement[bool] | None = None,
    owners: Sequence[InstrumentedAttribute[str]],
    order: InstrumentedAttribute[Any],
    limit: int,
    most: Sequence[int] = (),
    source: FromClause | None = None,
) -> list[Row]:
    """Lock up to `limit` due rows that no other transaction has locked, and return them.

    The caller then moves the end of their claims, so that they are held and no longer due. Rows are
    chosen in turns: first the row of the owner with the fewest held rows, so that an owner with a
    thousand due rows delays another owner's row by one turn. The cost grows with the due rows.

    Args:
        transaction: ends before the work begins: a dead process then loses its claim by time.
        table: the table of the rows.
        is_due: whether a row can be claimed, checked again when it is locked.
        is_held: whether someone works on a row now, so that it is not due; default: never.
        owners: columns that take turns, such as tenant and address: the tenants in turns, and the
            addresses of each tenant in turns.
        order: column by which one owner's rows follow each other.
        limit: the most rows to return.
        most: for each column of `owners`, the most rows of one owner that are held at once.
        source: joins `table` with the tables of the other columns; default: `table` alone.
    """
    source = source if source is not None else inspect(table).local_table
    is_held = false() if is_held is None else is_held
    is_due = and_(is_due, not_(is_held))
    primary = inspect(table).primary_key
    if (
        await transaction.scalar(select(primary[0]).select_from(source).where(is_due).limit(1))
        is None
    ):
        return []  # Most often. The statement for turns takes far longer.
    keys = [column.label(f"key_{at}") for at, column in enumerate(primary)]
    shares = [column.label(f"owner_{at}") for at, column in enumerate(owners)]
    due = select(*keys, *shares, order.label(_ORDER)).select_from(source).where(is_due).subquery()
    for depth in range(len(owners), 0, -1):
        names = [share.name for share in shares[:depth]]
        held = (
            select(*shares[:depth], func.count().label("held"))
            .select_from(source)
            .where(is_held)
            .group_by(*owners[:depth])
            .subquery()
        )
        within = [due.c[name] for name in names]
        # Rows of one owner: those whose inner owner's turn is earlier first.
        rank = func.row_number().over(
            partition_by=within, order_by=[due.c[name] for name in (_TURN, _ORDER) if name in due.c]
        )
        turn = (rank + func.coalesce(held.c.held, 0)).label(_TURN)
        columns = [column for column in due.c if column.name != _TURN]
        is_same = and_(*(due.c[name] == held.c[name] for name in names))
        due = select(*columns, turn).select_from(due.outerjoin(held, is_same)).subquery()
        if most:
            due = select(due).where(due.c[_TURN] <= most[depth - 1]).subquery()
    is_row = and_(*(column == due.c[key.name] for column, key in zip(primary, keys, strict=True)))
    rows = await transaction.scalars(
        select(table)
        .select_from(source.join(due, is_row))
        .where(is_due)
        .order_by(due.c[_TURN], due.c[_ORDER])
        .limit(limit)
        .with_for_update(of=table, skip_locked=True)
    )
    return list(rows)


class LostClaimError(Exception):
    """The claim of a row has expired, or its owner has changed the row."""


class Claim:
    """The claim of one row.

    Args:
        database: has the row.
        end: the column with the ends of claims.
        key: the row's primary key.
        until: the end of this claim, which nobody else has set.
    """

    def __init__(
        self, database: Database, end: InstrumentedAttribute[Any], key: str, until: datetime
    ) -> None:
        self._database = database
        self._end = end
        self.key = key
        self._ends = {until}
        """Ends that the row may have: one that is cancelled while it is written may be stored."""
        self._changing = asyncio.Lock()

    @classmethod
    def of(
        cls, database: Database, row: Table, end: InstrumentedAttribute[Any], until: datetime
    ) -> "Claim":
        """Claim a locked row until a time, in this column."""
        setattr(row, end.key, until)
        [key] = inspect(type(row)).primary_key_from_instance(row)
        return cls(database, end, key, until)

    @asynccontextmanager
    async def changing(self, **columns: Any) -> AsyncIterator[AsyncSession]:
        """Change columns of the row, and what the block adds to the transaction.

        Raises LostClaimError, StoreUnavailableError.
        """
        table = self._end.class_
        [key] = inspect(table).primary_key
        async with self._changing:
            ends, new = [*self._ends], columns.get(self._end.key)
            if new is not None:
                self._ends.add(new)
            async with self._database.writing() as transaction:
                changed = await transaction.scalar(
                    update(table)
                    .where(key == self.key, self._end.in_(ends))
                    .values(**columns)
                    .returning(key)
                )
                if changed is None:
                    raise LostClaimError
                yield transaction
            if new is not None:
                self._ends = {new}

    async def change(self, **columns: Any) -> None:
        """Change columns of the row. Raises LostClaimError, StoreUnavailableError."""
        async with self.changing(**columns):
            pass

    async def hold(self, work: Coroutine[Any, Any, Result], *, seconds: float) -> Result:
        """Renew the claim while `work` runs. Return its result, or raise its error.

        Raises TimeoutError after `seconds`, and LostClaimError; `work` is then cancelled.
        """
        working, renewing = asyncio.create_task(work), asyncio.create_task(self._renew())
        try:
            await asyncio.wait(
                {working, renewing}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if working.done():
                return working.result()
            if renewing.done():
                renewing.result()
            raise TimeoutError
        finally:
            await end_task(working, renewing)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(CLAIM.total_seconds() / 3)
            with suppress(StoreUnavailableError):
                await self.change(**{self._end.key: utc_now() + CLAIM})


def claiming(
    database: Database,
    end: InstrumentedAttribute[Any],
    lock: Callable[[AsyncSession, datetime, int, Collection[str]], Awaitable[Iterable[Row]]],
    claim: timedelta = CLAIM,
) -> Callable[[int, Collection[str]], Awaitable[dict[str, tuple[Row, Claim]]]]:
    """Return what claims rows for `Slots`.

    Args:
        database: has the rows.
        end: the column with the ends of claims.
        lock: locks rows that are due at a time: at most so many, and none with these keys.
        claim: how long a row is claimed, unless its claim is renewed.
    """

    async def locked(limit: int, held: Collection[str]) -> dict[str, tuple[Row, Claim]]:
        now = utc_now()
        async with database.writing() as transaction:
            rows = await lock(transaction, now, limit, held)
            claims = ((row, Claim.of(database, row, end, now + claim)) for row in rows)
            return {made.key: (row, made) for row, made in claims}

    return locked


class Slots(Generic[Item]):
    """Work on claimed items in some slots. A slow item keeps its own slot only, also beyond a run.

    Args:
        number: the most items at once.
        claim: claims at most so many items; it receives the keys of those in the slots too, and
            returns the items by key.
        work: works on an item, within a time of its own; returns whether it succeeded.
    """

    def __init__(
        self,
        number: int,
        claim: Callable[[int, Collection[str]], Awaitable[Mapping[str, Item]]],
        work: Callable[[Item], Coroutine[Any, Any, bool]],
    ) -> None:
        self._number = number
        self._claim = claim
        self._work = work
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._succeeded = 0
        self._outage: StoreUnavailableError | None = None

    @property
    def keys(self) -> Collection[str]:
        """The keys of the items in the slots."""
        return self._running.keys()

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return sum(not task.done() for task in self._running.values()) >= self._number

    async def run(self, *, seconds: float = TURN_SECONDS) -> int:
        """Begin due items until none is left or `seconds` are over.

        Return how many have succeeded since the last run. Raises StoreUnavailableError.
        """
        deadline = time.monotonic() + seconds
        while True:
            have_run = bool(self._running)
            if free := self._number - len(self._running):
                for key, item in (await self._claim(free, self._running.keys())).items():
                    self._running[key] = asyncio.create_task(self._work(item))
                    self._running[key].add_done_callback(partial(self._end, key))
            left = deadline - time.monotonic()
            # An item that has ended during the claim may have kept others from it.
            if left <= 0 or not (self._running or have_run):
                break
            if self._running:
                await asyncio.wait(self._running.values(), timeout=min(left, LOOK_SECONDS))
        succeeded, outage, self._succeeded, self._outage = self._succeeded, self._outage, 0, None
        if outage is not None:
            raise outage
        return succeeded

    async def aclose(self) -> None:
        """Cancel the work on all items. Their claims expire."""
        await end_task(*self._running.values())

    def _end(self, key: str, task: "asyncio.Task[bool]") -> None:
        del self._running[key]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StoreUnavailableError):
            self._outage = error
        elif error is not None:
            logger.error("the work on %s failed", key, exc_info=error)
        else:
            self._succeeded += not task.cancelled() and task.result()
