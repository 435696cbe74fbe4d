"""Claims: rows that one process works on until a time, chosen in turns of those who own them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final, TypeVar

from sqlalchemy import ColumnElement, FromClause, and_, func, inspect, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from gateway.database.tables import Table

Row = TypeVar("Row", bound=Table)
_ORDER: Final = "claim_order"
_TURN: Final = "claim_turn"


async def lock_in_turns(
    transaction: AsyncSession,
    table: type[Row],
    *,
    is_due: ColumnElement[bool],
    is_held: ColumnElement[bool],
    owners: Sequence[InstrumentedAttribute[str]],
    order: InstrumentedAttribute[datetime],
    limit: int,
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
        is_held: whether a process works on a row now.
        owners: columns that take turns, such as tenant and address: the tenants in turns, and the
            addresses of each tenant in turns.
        order: column by which one owner's rows follow each other.
        limit: the most rows to return.
        source: joins `table` with the tables of the other columns; default: `table` alone.
    """
    source = source if source is not None else inspect(table).local_table
    keys = [column.label(f"key_{at}") for at, column in enumerate(inspect(table).primary_key)]
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
    first = select(*(due.c[key.name] for key in keys)).order_by(due.c[_TURN], due.c[_ORDER])
    rows = await transaction.scalars(
        select(table)
        .select_from(source)
        .where(tuple_(*inspect(table).primary_key).in_(first.limit(limit)), is_due)
        .with_for_update(of=table, skip_locked=True)
    )
    return list(rows)
