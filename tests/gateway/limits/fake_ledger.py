"""A ledger in memory that can be slow, unreachable, or in the middle of a drain."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from msgspec import structs

from contract import keys
from contract.scripts import CommandExecutor
from gateway.limits.counters import Period
from gateway.limits.seeding import Balances, Recorded
from gateway.records.errors import StoreUnavailableError
from gateway.records.limits import SubjectLimits
from gateway.records.usage_record import UsageRecord, decode_usage
from tests.gateway.limits.building import BUCKET


class FakeLedger:
    """Keeps one record of each request, with what later ones have more, as the real one does."""

    def __init__(self) -> None:
        self.records: dict[str, UsageRecord] = {}
        self.granted = 0
        self.is_away = False
        self.questions = 0
        self.delay_seconds = 0.0
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        """Called after the numbers are read and before they are returned."""

    async def __call__(
        self,
        tenant_id: str,
        subject: SubjectLimits,
        *,
        day_start_ms: int,
        period: Period,
        request_ids: Collection[str],
    ) -> Balances:
        self.questions += 1
        if self.is_away:
            raise StoreUnavailableError("The database cannot be reached at the moment.")
        all_ = self.records.values()
        mine = [r for r in all_ if r.tenant_id == tenant_id and r.counts_for(subject)]
        today = [r for r in mine if r.created_ms >= day_start_ms]
        is_tenant = subject.has_credit
        balances = Balances(
            requests_today=len(today),
            tokens_today=sum(r.prompt_tokens + r.completion_tokens for r in today),
            audio_seconds_today=sum(r.audio_seconds for r in today),
            cost_this_month=sum(r.cost_micros for r in mine if period.contains(r.created_ms)),
            credit_micros=self.granted - sum(r.cost_micros for r in mine if r.is_prepaid)
            if is_tenant
            else None,
            known={
                id_: Recorded(
                    found.prompt_tokens + found.completion_tokens,
                    found.audio_seconds,
                    found.cost_micros,
                )
                for id_ in request_ids
                if (found := self.records.get(id_)) is not None
            },
        )
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return balances

    async def drain(
        self, redis: CommandExecutor, *, most: int = 1000, deletes: bool = True
    ) -> None:
        """Take records from the stream; `deletes` is whether they are deleted there as well."""
        entries: list[tuple[bytes, dict[bytes, bytes]]] = await redis.execute_command(
            "XRANGE", keys.usage(BUCKET), "-", "+", "COUNT", most
        )
        for entry, fields in entries:
            record = decode_usage(fields[b"u"])
            add(self.records, record)
            if deletes:
                await redis.execute_command("XDEL", keys.usage(BUCKET), entry)


def add(records: dict[str, UsageRecord], record: UsageRecord) -> None:
    """Add a record, or what it has more than the one of its request."""
    first = records.setdefault(record.request_id, record)
    larger = max(first, record, key=lambda each: each.prompt_tokens + each.completion_tokens)
    records[record.request_id] = structs.replace(
        first,
        prompt_tokens=larger.prompt_tokens,
        completion_tokens=larger.completion_tokens,
        audio_seconds=max(first.audio_seconds, record.audio_seconds),
        cost_micros=max(first.cost_micros, record.cost_micros),
    )
