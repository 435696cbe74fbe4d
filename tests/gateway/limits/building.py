"""Parts of the tests of limits: subjects, requests, records, and a clock."""

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from typing import Any

from redis.asyncio import Redis

from contract import keys
from contract.scripts import CommandExecutor, LuaScript
from gateway.limits import store as store_module
from gateway.limits.counters import AccountNumbers
from gateway.limits.replies import (
    METERED,
    NO_LIMIT,
    Admitted,
    Kept,
    Refused,
    Remaining,
    RequestEnd,
    ReservationRequest,
)
from gateway.limits.store import QuotaStore
from gateway.records.limits import (
    LimitName,
    Limits,
    LimitScope,
    SpendScope,
    SubjectLimits,
    Window,
)
from gateway.records.spending import SpendLimit
from gateway.records.usage_record import Outcome, UsageRecord

TENANT = "acme"
BUCKET = keys.bucket_of(TENANT)
LEASE_MS = 30_000
MINUTE_MS = 60_000
DAY_MS = 86_400_000
NOON = 1_800_014_400_000
"""2027-01-15 12:00:00 UTC in Unix milliseconds."""

SCRIPTS = [name for name, value in vars(store_module).items() if isinstance(value, LuaScript)]
_TIME = b"local time = redis.call('TIME')"
_TEST_TIME = (
    b"local time = redis.call('LRANGE', string.match(KEYS[1], '^{.-}:') .. 'test-clock', 0, 1)"
)


def with_test_clock(script: LuaScript) -> LuaScript:
    """Return the script with its time, if it reads any, taken from a key."""
    clocked = copy.copy(script)
    clocked.source = script.source.replace(_TIME, _TEST_TIME)
    clocked.digest = hashlib.sha1(clocked.source).hexdigest()
    return clocked


@dataclass
class TestClock:
    """The time of the scripts whose keys have one prefix, such as that of a bucket."""

    __test__ = False  # Not a test class for pytest.

    redis: "Redis"
    now_ms: int = NOON
    prefix: str = keys.bucket_prefix(BUCKET)

    async def set(self, now_ms: int) -> None:
        """Set the time."""
        self.now_ms = now_ms
        key = f"{self.prefix}test-clock"
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.execute_command("DEL", key)
        pipeline.execute_command("RPUSH", key, now_ms // 1000, now_ms % 1000 * 1000 + 999)
        await pipeline.execute()

    async def advance(self, milliseconds: int) -> None:
        """Advance the time."""
        await self.set(self.now_ms + milliseconds)


def subject(scope: LimitScope, id_: str, **limits: int | None) -> SubjectLimits:
    """Make a holder of limits."""
    return SubjectLimits(scope, id_, Limits(**limits))


def key_of(**limits: int | None) -> SubjectLimits:
    return subject(LimitScope.KEY, "key_ab", **limits)


def project_of(**limits: int | None) -> SubjectLimits:
    return subject(LimitScope.PROJECT, "proj", **limits)


def tenant_of(**limits: int | None) -> SubjectLimits:
    return subject(LimitScope.TENANT, TENANT, **limits)


def record(request_id: str, **fields: Any) -> UsageRecord:
    """Make a usage record of the key in the project."""
    defaults: dict[str, Any] = {
        "tenant_id": TENANT,
        "project_id": "proj",
        "credential_id": "key_ab",
        "model": "m",
        "endpoint": "completions",
        "dialect": "openai",
        "created_ms": NOON,
        "outcome": Outcome.FINISHED,
    }
    return UsageRecord(request_id=request_id, **(defaults | fields))


def settlement(record: UsageRecord, **how: Any) -> RequestEnd:
    """Make the settlement of a request."""
    return RequestEnd(
        tenant_id=record.tenant_id, request_id=record.admitted_id, record=record, **how
    )


def kept(term: int = 1, *, owner: str = "g1", key: str = "", **fields: Any) -> Kept:
    """Make the owner of a request that is kept, perhaps with an Idempotency-Key."""
    entry = keys.idempotency(BUCKET, TENANT, key) if key else ""
    defaults = {"is_background": False, "retention_ms": 600_000, "entry": entry}
    return Kept(owner, term, **{**defaults, "body_digest": "body", **fields})


def release_of(request_id: str, **how: Any) -> RequestEnd:
    """Make the release of a request."""
    return RequestEnd(tenant_id=TENANT, request_id=request_id, **how)


@dataclass
class Desk:
    """One set of subjects, and short ways to reserve for them."""

    store: QuotaStore
    subjects: tuple[SubjectLimits, ...]
    is_prepaid: bool = False
    number: int = 0
    requests: dict[str, ReservationRequest] = field(default_factory=dict)

    def request(
        self,
        request_id: str,
        *,
        prompt: int = 10,
        completion: int = 20,
        audio: int = 5,
        cost: int = 0,
        kept: Kept | None = None,
    ) -> ReservationRequest:
        """Make a request of the subjects."""
        return ReservationRequest(
            request_id=request_id,
            tenant_id=TENANT,
            subjects=self.subjects,
            prompt_tokens=prompt,
            completion_tokens=completion,
            audio_seconds=audio,
            cost_micros=cost,
            is_prepaid=self.is_prepaid,
            record=b"draft of " + request_id.encode(),
            kept=kept,
        )

    async def reserve(self, request_id: str | None = None, **amounts: Any) -> Any:
        """Reserve, under a new request id unless one is given."""
        self.number += 1
        request = self.request(request_id or f"r{self.number}", **amounts)
        return await self.store.reserve(request, lease_ms=LEASE_MS)

    async def extend(self, request_id: str, **amounts: Any) -> Any:
        """Make the reservation of an admitted request as large as this."""
        request = self.request(request_id, **amounts)
        return await self.store.reserve(request, lease_ms=LEASE_MS, extends=True)

    async def admit(self, request_id: str | None = None, **amounts: Any) -> Admitted:
        """Reserve, which must be admitted."""
        answer = await self.reserve(request_id, **amounts)
        assert isinstance(answer, Admitted), answer
        return answer

    async def refuse(self, request_id: str | None = None, **amounts: int) -> Refused:
        """Reserve, which must be refused."""
        answer = await self.reserve(request_id, **amounts)
        assert isinstance(answer, Refused), answer
        return answer

    async def settle(
        self,
        request_id: str,
        *,
        prompt: int = 10,
        completion: int = 20,
        audio: int = 5,
        cost: int = 0,
        **fields: Any,
    ) -> bool:
        """Settle with these amounts."""
        return await self.store.end(
            settlement(
                record(
                    request_id,
                    prompt_tokens=prompt,
                    completion_tokens=completion,
                    audio_seconds=audio,
                    cost_micros=cost,
                    is_prepaid=self.is_prepaid,
                    **fields,
                )
            )
        )

    async def seed(self, *subjects: SubjectLimits, now_ms: int = NOON, **numbers: Any) -> None:
        """Seed accounts, all of them unless some are named."""
        for one in subjects or self.subjects:
            await seed(self.store, one, now_ms=now_ms, **numbers)


async def seed(
    store: QuotaStore,
    one: SubjectLimits,
    *,
    now_ms: int = NOON,
    version: int | None = None,
    **numbers: Any,
) -> bool:
    """Seed one account as it stands, with zeroes unless numbers are given."""
    if version is None:
        version = (await store.status(TENANT, [one]))[0].version
    of_periods = {"day": now_ms // DAY_MS, "month": month_of(now_ms)} | numbers
    return await store.seed(TENANT, one, AccountNumbers(**of_periods), version=version)


def month_of(now_ms: int) -> int:
    """Return YYYYMM, computed differently than in the code."""
    import time

    moment = time.gmtime(now_ms // 1000)
    return moment.tm_year * 100 + moment.tm_mon


def remaining(values: Mapping[SubjectLimits, Mapping[LimitName | None, int]]) -> Remaining:
    """Return the remainders of a reply."""
    places = product(values.values(), METERED)
    return Remaining((*values,), [own.get(limit, NO_LIMIT) for own, limit in places])


def left(answer: Admitted | Refused, scope: LimitScope) -> Mapping[LimitName | None, int]:
    """Return the remaining limits of a subject in a reply."""
    subjects, values = answer.remaining
    places = zip(product(subjects, METERED), values, strict=True)
    return {
        limit: value
        for (subject, limit), value in places
        if subject.scope is scope and value != NO_LIMIT
    }


async def usage(redis: "Redis", bucket: int = BUCKET) -> list[UsageRecord]:
    """Return all records that wait for the ledger."""
    records: list[UsageRecord] = []
    after: str | None = "-"
    while after is not None:
        page, after = await QuotaStore(redis).undrained(bucket, after=after)
        records += page
    return records


async def bucket_keys(redis: "Redis", bucket: int = BUCKET) -> set[str]:
    """Return the existing keys of a bucket, without the clock's."""
    found = {key.decode() async for key in redis.scan_iter(f"{keys.bucket_prefix(bucket)}*")}
    return found - {f"{keys.bucket_prefix(bucket)}test-clock"}


async def open_ids(redis: CommandExecutor, bucket: int = BUCKET) -> set[str]:
    """Return the ids of all open reservations of a bucket."""
    members = await redis.execute_command("ZRANGE", keys.open_requests(bucket), 0, -1)
    return {member.decode() for member in members}


async def counted_bytes(redis: "Redis", tenant: str, request_id: str) -> int:
    """Return the bytes that count for a request, by its record."""
    record = keys.request(keys.bucket_of(tenant), request_id)
    counted: Any = await redis.hget(record, "bytes")
    return int((counted or b":0").rpartition(b":")[2])


def spend_limit(id_: str = "spl_1", **options: Any) -> SpendLimit:
    """Return a spend limit of the tenant, for all models and a month unless `options` differ."""
    defaults: dict[str, Any] = {
        "tenant_id": TENANT,
        "scope": SpendScope.TENANT,
        "holder": None,
        "model": None,
        "window": Window.MONTH,
        "starts_on": 1,
        "amount_micros": 100,
        "created_at": datetime(2027, 1, 1, tzinfo=UTC),
    }
    return SpendLimit(id=id_, **(defaults | options))
