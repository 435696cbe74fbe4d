"""Drain usage records from Redis to the ledger: at least once; the ledger keeps one of each."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ClusterCrossSlotError, RedisError

from common.redis_cluster import slot_map_of
from contract import keys
from gateway.billing.ledger.store import BATCH, LedgerStore
from gateway.limits.store import QuotaStore
from gateway.platform.database.engine import Database
from gateway.platform.database.holders import spend_limits_of
from gateway.platform.database.tables import SpendLimitRow
from gateway.platform.redis_client import shared_connection
from gateway.records.spending import SpendLimit, missed
from gateway.records.times import MAX_MS, to_time
from gateway.records.usage_record import Counts, UsageRecord, readable_usage

MAX_INTEGER: Final = 2**63 - 1
"""Largest value of a database column."""
_NUMBERS: Final = (
    *("jobs", "prompt_price", "cached_price", "completion_price", "audio_price"),
    *Counts._fields,
    *(f"free_{name}" for name in Counts._fields),
    *("cost_micros", "first_token_ms", "preemptions", "recomputed_tokens", "class_crossings"),
)
_TEXTS: Final = tuple(
    field.name for field in msgspec.structs.fields(UsageRecord) if field.type in (str, str | None)
)


class UnusableRecordError(Exception):
    """The record contains a value that the database cannot store."""


def row_of(record: UsageRecord) -> dict[str, Any]:
    """Return the row's columns. Raises UnusableRecordError."""
    row = msgspec.structs.asdict(record) | {"model": record.full_model}
    for name in _TEXTS:
        # PostgreSQL rejects the character NUL in text, but the record must still be stored.
        if "\0" in (row[name] or ""):
            row[name] = row[name].replace("\0", "\N{REPLACEMENT CHARACTER}")
    created_ms, ended_ms = row.pop("created_ms"), row.pop("ended_ms")
    del row["line"], row["ledger_id"]  # The ledger has its tier and its id.
    del row["adapter"], row["is_ranked"], row["job_seconds"], row["spend_limits"]
    numbers = [row[name] for name in _NUMBERS]
    if not all(0 <= number <= MAX_INTEGER for number in numbers):
        raise UnusableRecordError("a count is negative or too large")
    if not (0 <= created_ms <= MAX_MS and 0 <= ended_ms <= MAX_MS):
        raise UnusableRecordError("a time is out of range")
    return row | {"created_at": to_time(created_ms), "ended_at": to_time(ended_ms)}


RETRY_SECONDS: Final = 10.0
"""How long a bucket that did not respond is left out: others would wait for its timeout."""
FIELD: Final = b"u"

Entry = tuple[bytes, Mapping[bytes, bytes]]
"""Id and fields of a stream entry."""

logger = logging.getLogger(__name__)


async def read_usage(
    redis: Redis, buckets: Sequence[int], *, most: int
) -> tuple[dict[int, list[Entry]], dict[int, RedisError]]:
    """Return the oldest entries of each bucket that has any, and the errors of other buckets."""
    if slot_map_of(redis) is None:
        names = {keys.usage(bucket).encode(): bucket for bucket in buckets}
        with suppress(ClusterCrossSlotError):
            # One command finds that all streams are empty, as they mostly are.
            found = await redis.execute_command(
                "XREAD", "COUNT", most, "STREAMS", *names, *(["0-0"] * len(names))
            )
            return {names[name]: page for name, page in found}, {}
    pipeline = redis.pipeline(transaction=False)
    for bucket in buckets:
        pipeline.execute_command("XRANGE", keys.usage(bucket), "-", "+", "COUNT", most)
    pages = dict(zip(buckets, await pipeline.execute(raise_on_error=False), strict=True))
    failed = {bucket: page for bucket, page in pages.items() if isinstance(page, RedisError)}
    return {each: page for each, page in pages.items() if page and each not in failed}, failed


@dataclass(slots=True)
class _Batch:
    """The rows that one transaction inserts, and their stream entries."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    records: list[UsageRecord] = field(default_factory=list)
    """Those of the rows."""
    entries: dict[int, list[bytes]] = field(default_factory=dict)
    """Bucket -> ids of stream entries."""


class Drain:
    """Drains the 64 streams."""

    def __init__(self, redis: Redis, database: Database) -> None:
        self._redis = redis
        self._database = database
        self._quotas = QuotaStore(shared_connection(redis))
        self._retry_at: defaultdict[int, float] = defaultdict(float)
        """When buckets that did not respond are tried again, in `time.monotonic`."""

    async def run(self, *, seconds: float = 20.0) -> int:
        """Drain until the streams are empty or `seconds` are over.

        Returns how many records are new to the ledger. Raises RedisError or StoreUnavailableError;
        records that are not in the ledger then stay in their streams. A bucket that does not
        respond delays no other, and is left out for RETRY_SECONDS.
        """
        began = time.monotonic()
        buckets = [each for each in range(keys.BUCKETS) if self._retry_at[each] <= began]
        errors, added = list[RedisError](), 0
        while buckets:
            pages, failed = await read_usage(self._redis, buckets, most=BATCH)
            errors += failed.values()
            self._retry_at.update(dict.fromkeys(failed, time.monotonic() + RETRY_SECONDS))
            for batch in await self._batches(pages):
                added += await self._move(batch)
            if time.monotonic() > began + seconds:
                break
            buckets = [bucket for bucket, page in pages.items() if len(page) == BATCH]
        if errors:
            raise errors[0]
        return added

    async def _batches(self, pages: Mapping[int, Iterable[Entry]]) -> list[_Batch]:
        """Group the entries of all buckets into as few transactions as possible."""
        batches = [_Batch()]
        for bucket, page in pages.items():
            for entry_id, fields in page:
                record = readable_usage(fields.get(FIELD))
                row = None if record is None else _row(record)
                if record is None or row is None:
                    await self._put_aside(bucket, entry_id, fields)
                    continue
                if len(batches[-1].rows) == BATCH:
                    batches.append(_Batch())
                batches[-1].rows.append(row)
                batches[-1].records.append(record)
                batches[-1].entries.setdefault(bucket, []).append(entry_id)
        return [batch for batch in batches if batch.rows]

    async def _move(self, batch: _Batch) -> int:
        lines = {each.request_id for each in batch.records if each.line}
        tenants = {each.tenant_id for each in batch.records}
        async with self._database.writing() as transaction:
            added = await LedgerStore(transaction).insert(batch.rows, lines=lines)
            limits = await spend_limits_of(transaction, SpendLimitRow.tenant_id.in_(tenants))
        if limits:
            await self._derive_missed(limits, batch.records)
        # The entries are no longer needed. If deleting them fails, a second insert has no effect.
        pipeline = self._redis.pipeline(transaction=False)
        for bucket, entry_ids in batch.entries.items():
            pipeline.execute_command("XDEL", keys.usage(bucket), *entry_ids)
        await pipeline.execute()
        return added

    async def _derive_missed(
        self, limits: Sequence[SpendLimit], records: Iterable[UsageRecord]
    ) -> None:
        """Let spend limits be derived again that were added while a request ran."""
        by_tenant = defaultdict[str, list[SpendLimit]](list)
        for each in limits:
            by_tenant[each.tenant_id].append(each)
        found = {
            (record.tenant_id, name)
            for record in records
            if record.tenant_id in by_tenant
            for name in missed(by_tenant[record.tenant_id], record)
        }
        for tenant_id, name in sorted(found):
            await self._quotas.unseed(tenant_id, name)

    async def _put_aside(self, bucket: int, entry_id: bytes, fields: Mapping[bytes, bytes]) -> None:
        """Move an unreadable record to a separate key, so that it does not block the stream."""
        logger.error(
            "usage record %s of bucket %d is unreadable and was moved to %s",
            entry_id.decode(),
            bucket,
            keys.unreadable_usage(bucket),
        )
        content = fields.get(FIELD) or msgspec.msgpack.encode(dict(fields))
        # Both keys are in one bucket, so this is atomic on a cluster too.
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.execute_command("HSET", keys.unreadable_usage(bucket), entry_id, content)
        pipeline.execute_command("XDEL", keys.usage(bucket), entry_id)
        await pipeline.execute()


def _row(record: UsageRecord) -> dict[str, Any] | None:
    """Return the ledger row of a record; None if the ledger cannot store it."""
    try:
        return row_of(record)
    except UnusableRecordError:
        return None
