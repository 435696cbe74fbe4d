"""Queries on the tables `batches` and `batch_chunks`."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, case, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.database.paging import Page, PageRequest, read_page
from gateway.database.tables import BatchChunkRow, BatchRow
from gateway.files.store import Owner
from gateway.tenancy.batches import ENDED, Batch, BatchStatus, Chunk, ChunkState
from gateway.tenancy.times import EPOCH, utc_now

CLAIM: Final = timedelta(seconds=60)
"""How long a batch belongs to the task that validates or ends it, unless it renews the claim."""
LEASE: Final = timedelta(seconds=30)
"""How long a chunk belongs to a gateway, unless the gateway renews the lease."""
ROWS_AT_ONCE: Final = 1_000

RUNNING: Final = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING, BatchStatus.FINALIZING)
"""States of batches whose chunks gateways may run."""


class Progress(NamedTuple):
    """What ended lines add to the counts of their batch."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Claimed(NamedTuple):
    """A chunk that this gateway runs, and its batch."""

    batch: Batch
    chunk: Chunk


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
        self._transaction.add(BatchRow(**asdict(batch), claimed_until=EPOCH))
        await self._transaction.flush()

    async def find(self, owner: Owner, batch_id: str) -> Batch | None:
        """Return a batch of the owner."""
        row = await self._transaction.scalar(
            select(BatchRow).where(BatchRow.tenant_id == owner.tenant_id, BatchRow.id == batch_id)
        )
        is_seen = row is not None and owner.project_id in (None, row.project_id)
        return row.to_record() if row is not None and is_seen else None

    async def lock(self, batch_id: str) -> Batch:
        """Return a batch; no other transaction changes it before this one ends."""
        row = await self._transaction.scalar(
            select(BatchRow)
            .where(BatchRow.id == batch_id)
            .with_for_update()
            .execution_options(populate_existing=True)
        )
        assert row is not None  # noqa: S101 - batches are never removed
        return row.to_record()

    async def page(self, owner: Owner, wanted: PageRequest) -> Page[Batch]:
        """Return a page of the owner's batches."""
        conditions: list[ColumnElement[bool]] = [BatchRow.tenant_id == owner.tenant_id]
        if owner.project_id is not None:
            conditions.append(BatchRow.project_id == owner.project_id)
        page = await read_page(self._transaction, BatchRow, wanted, *conditions)
        return Page([row.to_record() for row in page.entries], page.has_more)

    async def change(self, batch_id: str, **columns: Any) -> None:
        """Change columns of a batch."""
        await self._transaction.execute(
            update(BatchRow).where(BatchRow.id == batch_id).values(**columns)
        )

    async def read(self, batch_ids: Collection[str]) -> list[Batch]:
        """Return these batches."""
        rows = await self._transaction.scalars(select(BatchRow).where(BatchRow.id.in_(batch_ids)))
        return [row.to_record() for row in rows]

    async def counts(self) -> dict[BatchStatus, int]:
        """Return the number of batches that have not ended, by status."""
        rows = await self._transaction.execute(
            select(BatchRow.status, func.count())
            .where(BatchRow.status.not_in(ENDED))
            .group_by(BatchRow.status)
        )
        return {status: number for status, number in rows}  # noqa: C416 - rows are no pairs

    async def in_states(self, states: Collection[BatchStatus], *, limit: int) -> list[Batch]:
        """Return batches in these states, the earliest deadline first."""
        rows = await self._transaction.scalars(
            select(BatchRow)
            .where(BatchRow.status.in_(states))
            .order_by(BatchRow.expires_at, BatchRow.id)
            .limit(limit)
        )
        return [row.to_record() for row in rows]

    async def claim(self, batch_id: str, now: datetime) -> bool:
        """Claim a batch for one task; return False if another task has claimed it."""
        changed = await self._transaction.scalars(
            update(BatchRow)
            .where(BatchRow.id == batch_id, BatchRow.claimed_until <= now)
            .values(claimed_until=now + CLAIM)
            .returning(BatchRow.id)
        )
        return bool(list(changed))

    async def renew_claim(self, batch_id: str, now: datetime) -> None:
        """Extend the claim of a task on a batch."""
        await self.change(batch_id, claimed_until=now + CLAIM)

    # -- chunks ----------------------------------------------------------------------------------

    async def add_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Insert chunks, which wait to be released."""
        new = {"state": ChunkState.WAITING, "gateway": "", "leased_until": EPOCH}
        for start in range(0, len(chunks), ROWS_AT_ONCE):
            rows = [asdict(chunk) | new for chunk in chunks[start : start + ROWS_AT_ONCE]]
            await self._transaction.execute(insert(BatchChunkRow), rows)

    async def remove_chunks(self, batch_id: str) -> None:
        """Remove the chunks of an ended batch."""
        await self._transaction.execute(
            delete(BatchChunkRow).where(BatchChunkRow.batch_id == batch_id)
        )

    async def claim_unclaimed(self, batch_id: str, now: datetime, *, limit: int) -> list[Chunk]:
        """Claim chunks that no gateway has ever run, to end them without running them."""
        rows = await self._transaction.scalars(
            select(BatchChunkRow)
            .where(
                BatchChunkRow.batch_id == batch_id,
                BatchChunkRow.state != ChunkState.DONE,
                BatchChunkRow.gateway == "",
                BatchChunkRow.leased_until <= now,
            )
            .order_by(BatchChunkRow.number)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        chunks = []
        for row in rows:
            row.leased_until = now + CLAIM
            chunks.append(row.to_record())
        await self._transaction.flush()
        return chunks

    async def is_done(self, batch_id: str) -> bool:
        """Return whether the results of all chunks are stored."""
        open_chunks = await self._transaction.scalar(
            select(func.count()).where(
                BatchChunkRow.batch_id == batch_id, BatchChunkRow.state != ChunkState.DONE
            )
        )
        return not open_chunks

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

    async def unclaimed_lines(self, batch_ids: Collection[str]) -> int:
        """Return the lines that are released but that no gateway runs yet."""
        lines = await self._transaction.scalar(
            select(func.sum(BatchChunkRow.lines)).where(
                BatchChunkRow.batch_id.in_(batch_ids),
                BatchChunkRow.state == ChunkState.RELEASED,
                BatchChunkRow.gateway == "",
            )
        )
        return int(lines or 0)

    async def release(self, batch_id: str, lines: int, now: datetime) -> int:
        """Release the next chunks of a batch for at least `lines` lines; return their lines."""
        rows = await self._transaction.execute(
            select(BatchChunkRow.number, BatchChunkRow.lines)
            .where(BatchChunkRow.batch_id == batch_id, BatchChunkRow.state == ChunkState.WAITING)
            .order_by(BatchChunkRow.number)
            .limit(lines)
        )
        released, numbers = 0, []
        for number, more in rows:
            if released >= lines:
                break
            released += more
            numbers.append(number)
        await self._transaction.execute(
            update(BatchChunkRow)
            .where(BatchChunkRow.batch_id == batch_id, BatchChunkRow.number.in_(numbers))
            .values(state=ChunkState.RELEASED, leased_until=now)
        )
        return released

    async def has_claimable(self, now: datetime) -> bool:
        """Return whether any chunk can be claimed."""
        found = await self._transaction.scalar(
            select(BatchChunkRow.number).where(*_claimable(now)).limit(1)
        )
        return found is not None

    async def claim_chunks(self, gateway: str, now: datetime, *, limit: int) -> list[Claimed]:
        """Lease released chunks to a gateway, those first that are released the longest."""
        rows = await self._transaction.execute(
            select(BatchChunkRow, BatchRow)
            .join(BatchRow, BatchRow.id == BatchChunkRow.batch_id)
            .where(*_claimable(now), BatchRow.status.in_(RUNNING))
            .order_by(BatchChunkRow.leased_until)
            .limit(limit)
            .with_for_update(of=BatchChunkRow, skip_locked=True)
        )
        claimed = []
        for chunk, batch in rows:
            claimed.append(Claimed(batch.to_record(), chunk.to_record()))
            chunk.gateway, chunk.leased_until = gateway, now + LEASE
        await self._transaction.flush()
        return claimed

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
        """Return which of these chunks another gateway has leased: batch and number."""
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

    async def lessees(self, batch_ids: Collection[str]) -> set[str]:
        """Return the gateways that have leased chunks of these batches."""
        rows = await self._transaction.scalars(
            select(BatchChunkRow.gateway)
            .distinct()
            .where(
                BatchChunkRow.batch_id.in_(batch_ids),
                BatchChunkRow.state == ChunkState.RELEASED,
                BatchChunkRow.gateway != "",
            )
        )
        return set(rows)

    async def end_leases(
        self, batch_ids: Collection[str], gateways: Collection[str], now: datetime
    ) -> None:
        """End the leases of dead gateways, so that others claim their chunks at once."""
        await self._transaction.execute(
            update(BatchChunkRow)
            .where(
                BatchChunkRow.batch_id.in_(batch_ids),
                BatchChunkRow.state == ChunkState.RELEASED,
                BatchChunkRow.gateway.in_(gateways),
                BatchChunkRow.leased_until > now,
            )
            .values(leased_until=now)
        )

    async def finish_chunks(self, chunks: Sequence[Chunk], progress: Progress) -> bool:
        """Record the end of the lines of a batch's chunks.

        Return False if the end of any was recorded before; roll the transaction back then.
        """
        batch_id = chunks[0].batch_id
        ended = await self._transaction.scalars(
            update(BatchChunkRow)
            .where(
                BatchChunkRow.batch_id == batch_id,
                BatchChunkRow.number.in_([chunk.number for chunk in chunks]),
                BatchChunkRow.state != ChunkState.DONE,
            )
            .values(state=ChunkState.DONE)
            .returning(BatchChunkRow.number)
        )
        if len(list(ended)) < len(chunks):
            return False
        more = {name: getattr(BatchRow, name) + value for name, value in progress._asdict().items()}
        await self.change(batch_id, progressed_at=utc_now(), **more)
        return True


def _by_batch(chunks: Iterable[Chunk]) -> list[tuple[str, list[int]]]:
    """Return the numbers of chunks by batch, in the order in which they are locked."""
    by_batch: dict[str, list[int]] = {}
    for chunk in chunks:
        by_batch.setdefault(chunk.batch_id, []).append(chunk.number)
    return sorted(by_batch.items())


def _claimable(now: datetime) -> tuple[ColumnElement[bool], ...]:
    is_released = BatchChunkRow.state == ChunkState.RELEASED
    return is_released, BatchChunkRow.leased_until <= now
