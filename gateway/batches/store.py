"""Queries on the tables `batches` and `batch_chunks`."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    and_,
    case,
    delete,
    exists,
    func,
    insert,
    inspect,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.platform.database.claims import CLAIM, lock_in_turns
from gateway.platform.database.paging import list_records
from gateway.platform.database.tables import BatchChunkRow, BatchRow, TenantRow
from gateway.records.batches import Batch, BatchStatus, Chunk, ChunkState
from gateway.records.records import TenantStatus
from gateway.records.times import EPOCH, utc_now

LEASE: Final = timedelta(seconds=30)
"""How long a chunk belongs to a gateway, unless the gateway renews the lease."""
REST: Final = timedelta(seconds=20)
"""How long no line of a batch is released after one had to wait for long: others come first."""
ROWS_AT_ONCE: Final = 1_000

RUNNING: Final = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING, BatchStatus.FINALIZING)
"""States of batches whose chunks gateways may run."""
OPEN: Final = (BatchStatus.VALIDATING, *RUNNING)

_UNCLAIMED: Final = {"state": ChunkState.WAITING, "gateway": "", "leased_until": EPOCH}


class Progress(NamedTuple):
    """What ended lines add to the counts of their batch."""

    completed: int = 0
    failed: int = 0
    unfinished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cost_micros: int = 0


class Claimed(NamedTuple):
    """A chunk that this gateway runs, and its batch."""

    batch: Batch
    chunk: Chunk


class Feed(NamedTuple):
    """The running batches of a tenant."""

    done: int
    """Their lines that have ended."""
    models: set[str]
    """Names of the models in their lines."""


class LineCounts(NamedTuple):
    """Lines of batches by state."""

    waiting: int
    released: int
    done: int


class BatchStore:
    """Batches, within one transaction."""

    def __init__(self, transaction: AsyncSession) -> None:
        self._transaction = transaction

    # -- batches ---------------------------------------------------------------------------------

    async def add(self, batch: Batch) -> None:
        """Insert a batch."""
        others = {"claimed_until": EPOCH, "due_at": batch.created_at, "resting_until": EPOCH}
        self._transaction.add(BatchRow(**asdict(batch), **others))
        await self._transaction.flush()

    async def lock(self, batch_id: str) -> Batch:
        """Return a batch; no other transaction changes it before this one ends."""
        rows = await self._transaction.scalars(
            select(BatchRow)
            .where(BatchRow.id == batch_id)
            .with_for_update()
            .execution_options(populate_existing=True)
        )
        return rows.one().to_record()

    async def change(self, batch_id: str, **columns: Any) -> Batch:
        """Change columns of a batch, and return it."""
        rows = await self._transaction.scalars(
            update(BatchRow)
            .where(BatchRow.id == batch_id)
            .values(**columns)
            .returning(BatchRow)
            .execution_options(populate_existing=True)
        )
        return rows.one().to_record()

    async def cancel(self, batch_id: str, now: datetime, **columns: Any) -> Batch:
        """Let a batch end at once, even if a process validates it or merges its results."""
        times = {"cancelling_at": now, "claimed_until": now, "due_at": now}
        return await self.change(batch_id, status=BatchStatus.CANCELLING, **times, **columns)

    async def read(self, batch_ids: Collection[str]) -> list[Batch]:
        """Return these batches."""
        return await list_records(self._transaction, BatchRow, BatchRow.id.in_(batch_ids))

    async def counts(self) -> dict[BatchStatus, int]:
        """Return the number of batches that have not ended, by status."""
        rows = await self._transaction.execute(
            select(BatchRow.status, func.count())
            .where(BatchRow.status.in_(OPEN))
            .group_by(BatchRow.status)
        )
        return dict(rows.all())

    async def in_progress(self, *, limit: int) -> list[Batch]:
        """Return running batches, the earliest deadline first."""
        is_running, order = BatchRow.status == BatchStatus.IN_PROGRESS, ("expires_at", "id")
        return await list_records(self._transaction, BatchRow, is_running, order=order, limit=limit)

    async def feeds(self) -> dict[str, Feed]:
        """Return what runs of each active tenant."""
        rows = await self._transaction.execute(
            select(BatchRow.tenant_id, BatchRow.completed + BatchRow.failed, BatchRow.models)
            .join(TenantRow, TenantRow.id == BatchRow.tenant_id)
            .where(
                BatchRow.status == BatchStatus.IN_PROGRESS,
                TenantRow.status == TenantStatus.ACTIVE,
            )
        )
        feeds = defaultdict[str, Feed](lambda: Feed(0, set()))
        for tenant_id, done, models in rows:
            feed = feeds[tenant_id]
            feeds[tenant_id] = Feed(feed.done + done, feed.models.union(models))
        return feeds

    # -- chunks ----------------------------------------------------------------------------------

    async def add_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Insert chunks, which wait to be released."""
        for start in range(0, len(chunks), ROWS_AT_ONCE):
            rows = [asdict(chunk) | _UNCLAIMED for chunk in chunks[start : start + ROWS_AT_ONCE]]
            await self._transaction.execute(insert(BatchChunkRow), rows)

    async def claim_unclaimed(self, batch_id: str, now: datetime, *, limit: int) -> list[Chunk]:
        """Claim chunks that no gateway has ever run, to end them without running them."""
        rows = await lock_in_turns(
            self._transaction,
            BatchChunkRow,
            is_due=and_(
                BatchChunkRow.batch_id == batch_id,
                BatchChunkRow.state != ChunkState.DONE,
                BatchChunkRow.gateway == "",
                BatchChunkRow.leased_until <= now,
            ),
            owners=(BatchChunkRow.batch_id,),
            order=BatchChunkRow.number,
            limit=limit,
        )
        for row in rows:
            row.leased_until = now + CLAIM
        await self._transaction.flush()
        return [row.to_record() for row in rows]

    async def open_chunks(self, batch_id: str, *, limit: int) -> list[Chunk]:
        """Return chunks whose results are not stored yet."""
        is_open = BatchChunkRow.batch_id == batch_id, BatchChunkRow.state != ChunkState.DONE
        return await list_records(self._transaction, BatchChunkRow, *is_open, order=(), limit=limit)

    async def lines_of(self, batch_ids: Collection[str]) -> LineCounts:
        """Return the lines of batches by the state of their chunks."""
        sums = [
            func.sum(case((BatchChunkRow.state == state, BatchChunkRow.lines), else_=0))
            for state in (ChunkState.WAITING, ChunkState.RELEASED, ChunkState.DONE)
        ]
        row = await self._transaction.execute(
            select(*sums).where(BatchChunkRow.batch_id.in_(batch_ids))
        )
        return LineCounts(*(int(value or 0) for value in row.one()))

    async def unclaimed_lines(self, tenant_id: str) -> int:
        """Return a tenant's lines that are released but that no gateway runs yet."""
        lines = await self._transaction.scalar(
            select(func.sum(BatchChunkRow.lines))
            .join(BatchRow, BatchRow.id == BatchChunkRow.batch_id)
            .where(
                BatchRow.tenant_id == tenant_id,
                BatchRow.status == BatchStatus.IN_PROGRESS,
                BatchChunkRow.state == ChunkState.RELEASED,
                BatchChunkRow.gateway == "",
            )
        )
        return int(lines or 0)

    async def release(self, tenant_id: str, lines: int, now: datetime) -> int:
        """Release a tenant's next chunks for at least `lines` lines; return their lines.

        The batch with the earliest deadline goes first.
        """
        is_waiting = BatchChunkRow.state == ChunkState.WAITING
        batch_ids = await self._transaction.scalars(
            select(BatchRow.id)
            .where(
                BatchRow.tenant_id == tenant_id,
                BatchRow.status == BatchStatus.IN_PROGRESS,
                BatchRow.expires_at > now,
                BatchRow.resting_until <= now,
                exists().where(BatchChunkRow.batch_id == BatchRow.id, is_waiting),
            )
            .order_by(BatchRow.expires_at, BatchRow.id)
            .limit(lines)
        )
        released = 0
        for batch_id in batch_ids:
            if released >= lines:
                break
            rows = await self._transaction.scalars(
                select(BatchChunkRow)
                .where(BatchChunkRow.batch_id == batch_id, is_waiting)
                .order_by(BatchChunkRow.number)
                .limit(lines - released)
            )
            for row in rows:
                if released < lines:
                    released += row.lines
                    row.state, row.leased_until = ChunkState.RELEASED, now
        await self._transaction.flush()
        return released

    async def has_claimable_chunk(self, now: datetime) -> bool:
        """Return whether any chunk can be claimed."""
        found = await self._transaction.scalar(
            select(BatchChunkRow.number).where(*_claimable(now)).limit(1)
        )
        return found is not None

    async def claim_chunks(
        self, gateway: str, now: datetime, *, limit: int, besides: Collection[str] = ()
    ) -> list[Claimed]:
        """Lease released chunks to a gateway, in turns of their tenants, without those `besides`.

        Those first that are released the longest.
        """
        chunks = inspect(BatchChunkRow).local_table
        rows = await lock_in_turns(
            self._transaction,
            BatchChunkRow,
            is_due=and_(
                *_claimable(now),
                BatchRow.status.in_(RUNNING),
                BatchRow.tenant_id.not_in(besides),
            ),
            is_held=and_(
                BatchChunkRow.state == ChunkState.RELEASED,
                BatchChunkRow.gateway != "",
                BatchChunkRow.leased_until > now,
            ),
            owners=(BatchRow.tenant_id,),
            order=BatchChunkRow.leased_until,
            limit=limit,
            source=chunks.join(inspect(BatchRow).local_table),
        )
        batches = {each.id: each for each in await self.read({row.batch_id for row in rows})}
        for row in rows:
            row.gateway, row.leased_until = gateway, now + LEASE
        await self._transaction.flush()
        return [Claimed(batches[row.batch_id], row.to_record()) for row in rows]

    async def renew(
        self, gateway: str, chunks: Iterable[Chunk], now: datetime, *, lease: timedelta = LEASE
    ) -> None:
        """Renew the leases of a gateway's chunks; with a lease of zero, give the chunks back."""
        for batch_id, numbers in _by_batch(chunks):
            await self._transaction.execute(
                update(BatchChunkRow)
                .where(
                    BatchChunkRow.batch_id == batch_id,
                    BatchChunkRow.number.in_(numbers),
                    BatchChunkRow.gateway == gateway,
                    BatchChunkRow.state == ChunkState.RELEASED,
                )
                .values(leased_until=now + lease)
            )

    async def lost(self, gateway: str, chunks: Iterable[Chunk]) -> set[tuple[str, int]]:
        """Return which of these chunks another gateway has leased or ended: batch and number."""
        lost = set[tuple[str, int]]()
        for batch_id, numbers in _by_batch(chunks):
            rows = await self._transaction.scalars(
                select(BatchChunkRow.number).where(
                    BatchChunkRow.batch_id == batch_id,
                    BatchChunkRow.number.in_(numbers),
                    BatchChunkRow.gateway != gateway,
                )
            )
            lost |= {(batch_id, number) for number in rows}
        return lost

    async def lessees(self) -> set[str]:
        """Return the gateways that have leased chunks."""
        rows = await self._transaction.scalars(
            select(BatchChunkRow.gateway)
            .distinct()
            .where(BatchChunkRow.state == ChunkState.RELEASED, BatchChunkRow.gateway != "")
        )
        return set(rows)

    async def end_leases(self, gateways: Collection[str], now: datetime) -> None:
        """End the leases of dead gateways, so that others claim their chunks at once."""
        await self._transaction.execute(
            update(BatchChunkRow)
            .where(
                BatchChunkRow.state == ChunkState.RELEASED,
                BatchChunkRow.gateway.in_(gateways),
                BatchChunkRow.leased_until > now,
            )
            .values(leased_until=now)
        )

    async def finish_chunks(
        self,
        chunks: Sequence[Chunk],
        progress: Progress,
        *,
        rest: Sequence[Chunk] = (),
        gateway: str = "",
    ) -> bool:
        """Record the end of the lines of a batch's chunks.

        Return False if the end of any was recorded before; roll the transaction back then.

        Args:
            chunks: the chunks, as they were claimed.
            progress: what their lines add to the counts.
            rest: lines of the only chunk that have not run, and are to be released again.
            gateway: ran the lines; empty if none did. It must still lease the chunk if there is a
                rest: another one may be running it.
        """
        batch_id = chunks[0].batch_id
        extents = [(chunk.number, chunk.lines) for chunk in chunks]
        ended = await self._transaction.scalars(
            update(BatchChunkRow)
            .where(
                BatchChunkRow.batch_id == batch_id,
                BatchChunkRow.number.in_([chunk.number for chunk in chunks]),
                # The rest of a chunk has its number.
                tuple_(BatchChunkRow.number, BatchChunkRow.lines).in_(extents),
                BatchChunkRow.state != ChunkState.DONE,
                BatchChunkRow.gateway == gateway if rest else true(),
            )
            .values(state=ChunkState.DONE, gateway=gateway)
            .returning(BatchChunkRow.number)
        )
        if len(list(ended)) < len(chunks):
            return False
        if rest:
            await self._put_back(rest)
            await self.change(batch_id, resting_until=utc_now() + REST)
        if progress.completed or progress.failed:
            more = {
                name: getattr(BatchRow, name) + value for name, value in progress._asdict().items()
            }
            await self.change(batch_id, progressed_at=utc_now(), **more)
        return True

    async def _put_back(self, rest: Sequence[Chunk]) -> None:
        """Replace a chunk by parts of it. The first one keeps its number."""
        first, of_batch = rest[0], BatchChunkRow.batch_id == rest[0].batch_id
        last = await self._transaction.scalar(
            select(func.max(BatchChunkRow.number)).where(of_batch)
        )
        await self._transaction.execute(
            delete(BatchChunkRow).where(of_batch, BatchChunkRow.number == first.number)
        )
        more = [replace(each, number=(last or 0) + at) for at, each in enumerate(rest[1:], 1)]
        await self.add_chunks([first, *more])


def _by_batch(chunks: Iterable[Chunk]) -> list[tuple[str, list[int]]]:
    """Return the numbers of chunks by batch, in the order in which they are locked."""
    by_batch: dict[str, list[int]] = {}
    for chunk in chunks:
        by_batch.setdefault(chunk.batch_id, []).append(chunk.number)
    return sorted(by_batch.items())


def _claimable(now: datetime) -> tuple[ColumnElement[bool], ...]:
    is_released = BatchChunkRow.state == ChunkState.RELEASED
    return is_released, BatchChunkRow.leased_until <= now
