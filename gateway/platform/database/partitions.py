"""Ledger partitions on PostgreSQL: one per UTC month, with names such as `usage_ledger_2026_11`."""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.claims import lock_kind
from gateway.platform.database.tables import LedgerRow
from gateway.records.times import month_start, next_month

PARTITION_LOCK: Final = 7_585_425
"""PostgreSQL advisory lock that serializes the creation of partitions."""
MONTHS_AHEAD: Final = 2
"""Months for which partitions are created in advance.

Insertions of usage then need not create any.
"""

_NAME = re.compile(rf"{LedgerRow.__tablename__}_\d{{4,}}_\d\d")


def is_partition(table: str) -> bool:
    """Whether a table is a partition, which the table definitions do not include."""
    return _NAME.fullmatch(table) is not None


def months_from(time: datetime) -> Iterator[datetime]:
    """Yield the beginning of the month and of those that are prepared ahead of it."""
    month = month_start(time)
    yield month
    for _ in range(MONTHS_AHEAD):
        month = next_month(month)
        yield month


async def make_partitions(transaction: AsyncSession, months: Iterable[datetime]) -> list[str]:
    """Create the partitions of these months, given by their beginnings.

    Return the names of new partitions.

    Other transactions see them after the commit. SQLite has no partitions.
    """
    if transaction.get_bind().dialect.name != "postgresql":
        return []
    wanted = {_name(month): month for month in sorted(set(months))}
    if wanted.keys() <= await _existing(transaction):
        return []
    await lock_kind(transaction, PARTITION_LOCK)
    missing = wanted.keys() - await _existing(transaction)
    return [await _make(transaction, wanted[name]) for name in wanted if name in missing]


async def _existing(transaction: AsyncSession) -> set[str]:
    # Not to_regclass: within a transaction it caches names that it did not find.
    names = await transaction.scalars(
        text(
            "SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid "
            "WHERE inhparent = CAST(:ledger AS regclass)"
        ),
        {"ledger": LedgerRow.__tablename__},
    )
    return set(names)


async def _make(transaction: AsyncSession, month: datetime) -> str:
    # Create the table separately and then attach it: unlike CREATE ... PARTITION OF, this does not
    # block other transactions.
    ledger, name = LedgerRow.__tablename__, _name(month)
    await transaction.execute(
        text(f"CREATE TABLE {name} (LIKE {ledger} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
    )
    await transaction.execute(
        text(
            f"ALTER TABLE {ledger} ATTACH PARTITION {name} "
            f"FOR VALUES FROM ('{month.isoformat()}') TO ('{next_month(month).isoformat()}')"
        )
    )
    return name


def _name(month: datetime) -> str:
    return f"{LedgerRow.__tablename__}_{month:%Y_%m}"
