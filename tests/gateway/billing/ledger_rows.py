"""Records of usage, made up, and the ledger that holds them."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import count
from typing import Any

import msgspec
from sqlalchemy import delete

from contract.tier import ServiceTier
from gateway.billing.ledger.drain import row_of
from gateway.billing.usage.parts import UsageSums
from gateway.platform.database.engine import Database
from gateway.platform.database.partitions import make_partitions
from gateway.platform.database.tables import DirtyHourRow, LedgerRow, RollupPeriod, RollupRow
from gateway.records.times import day_of, hour_of, month_start, to_ms, to_time
from gateway.records.usage_record import Outcome, UsageRecord

NOON = datetime(2026, 11, 10, 12, tzinfo=UTC)

_numbers = count(1)


def record(at: datetime = NOON, **fields: Any) -> UsageRecord:
    """Return a record with a new id and its cost."""
    number = next(_numbers)
    known: dict[str, Any] = {
        "request_id": f"cmpl-{number:06}",
        "tenant_id": "acme",
        "project_id": None,
        "credential_id": "key_1",
        "model": "m1",
        "endpoint": "completions",
        "dialect": "openai",
        "created_ms": to_ms(at),
        "ended_ms": to_ms(at) + 1500,
        "outcome": Outcome.FINISHED,
        "prompt_tokens": 10 + number,
        "cached_tokens": number % 7,
        "completion_tokens": 20,
        "prompt_price": 150_000,
        "cached_price": 75_000,
        "completion_price": 600_000,
        "service_tier": ServiceTier.DEFAULT,
        "gateway": "gw-1",
        "first_token_ms": 120,
        "preemptions": 2,
        "recomputed_tokens": 96,
        "exactness_class": "438df8cab49b",
        "class_crossings": 0,
    }
    record = UsageRecord(**(known | fields))
    cost_micros = record.cost_of(
        prompt_tokens=record.prompt_tokens - record.free_prompt_tokens,
        cached_tokens=record.cached_tokens - record.free_cached_tokens,
        completion_tokens=record.completion_tokens - record.free_completion_tokens,
        audio_seconds=record.audio_seconds - record.free_audio_seconds,
    )
    return msgspec.structs.replace(record, cost_micros=cost_micros)


async def add(database: Database, records: Iterable[UsageRecord]) -> None:
    """Add rows to the ledger, and a mark for each of their hours, as the drain does."""
    known = list(records)
    async with database.writing() as transaction:
        await make_partitions(
            transaction, {month_start(to_time(each.created_ms)) for each in known}
        )
        transaction.add_all(_row(each) for each in known)
        hours = {hour_of(to_time(each.created_ms)) for each in known}
        transaction.add_all(DirtyHourRow(hour=hour) for hour in hours)


async def sum_up(
    database: Database, records: Iterable[UsageRecord], hours: Iterable[datetime]
) -> None:
    """Sum up some hours and their days from the records, and remove the hours' marks."""
    clean = set(hours)
    known = list(records)
    days = {day_of(hour) for hour in clean}
    async with database.writing() as transaction:
        for start in clean:
            await transaction.execute(delete(DirtyHourRow).where(DirtyHourRow.hour == start))
        for period, starts, floor in (
            (RollupPeriod.HOUR, clean, hour_of),
            (RollupPeriod.DAY, days, day_of),
        ):
            for start in starts:
                inside = [each for each in known if floor(to_time(each.created_ms)) == start]
                await transaction.execute(
                    delete(RollupRow).where(RollupRow.period == period, RollupRow.start_at == start)
                )
                transaction.add_all(_sums(period, start, inside))


def _sums(period: RollupPeriod, start: datetime, records: list[UsageRecord]) -> Iterable[RollupRow]:
    groups: defaultdict[tuple[str, str, str, str, ServiceTier], list[UsageRecord]]
    groups = defaultdict(list)
    for each in records:
        project = each.project_id or ""
        key = (each.tenant_id, project, each.credential_id, each.model, each.service_tier)
        groups[key].append(each)
    for (tenant, project, credential, model, tier), members in groups.items():
        yield RollupRow(
            period=period,
            start_at=start,
            tenant_id=tenant,
            project_id=project,
            credential_id=credential,
            model=model,
            service_tier=tier,
            **totals(members)._asdict(),
        )


def totals(records: Iterable[UsageRecord]) -> UsageSums:
    """Return the sums over some records."""
    known = list(records)
    first = [each for each in known if ".late" not in each.request_id]
    return UsageSums(
        requests=len(first),
        failed_requests=sum(
            each.outcome not in (Outcome.FINISHED, Outcome.CANCELLED) for each in first
        ),
        prompt_tokens=sum(each.prompt_tokens for each in known),
        cached_tokens=sum(each.cached_tokens for each in known),
        completion_tokens=sum(each.completion_tokens for each in known),
        audio_seconds=sum(each.audio_seconds for each in known),
        cost_micros=sum(each.cost_micros for each in known),
    )


def _row(each: UsageRecord) -> LedgerRow:
    return LedgerRow(**row_of(each))
