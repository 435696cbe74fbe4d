"""Redis store of limits, reservations and usage records: a typed method for each script.

All data of a tenant is in its bucket, so one script can check every limit of a request.
"""

import asyncio
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

from common import clock
from contract import keys
from contract.scripts import Argument, CommandExecutor, LuaScript
from contract.scripts.batcher import ScriptBatcher
from contract.scripts.cluster import ServerProcesses
from gateway.limits.counters import ACCOUNT_MS, FIELD, AccountNumbers, period_of
from gateway.limits.replies import (
    Admitted,
    AuditResult,
    Claim,
    ExpiredReservation,
    Kept,
    LiveReservations,
    NeedsSeed,
    Refused,
    Remaining,
    RequestEnd,
    RequestState,
    RequestStatus,
    ReservationRequest,
    ReserveReply,
    SubjectStatus,
    Withdrawn,
)
from gateway.records.limits import (
    RESERVED_LIMITS,
    Bounds,
    LimitName,
    LimitScope,
    SubjectLimits,
    subject_of,
)
from gateway.records.spending import SpendLimit
from gateway.records.usage_record import Counts, UsageRecord, encode_usage, readable_usage

MOST_OPEN: Final = 20_000
"""Open reservations of a bucket that a search for one tenant reads at most."""
OPEN_AT_ONCE: Final = 500
"""Reservations that one script reads, and accounts that are read at once: more would delay other
commands."""
MOST_SHARED: Final = 32
"""Requests of one turn of the event loop that one script reserves or ends: more would delay other
commands."""
USAGE_PAGE: Final = 200
"""Usage records per read, so that reading many of them does not block other work."""

_PACKAGE = "gateway.limits.scripts"
_CLAIM = LuaScript("request_claim", _PACKAGE)
_ADMIT = LuaScript("request_admit", _PACKAGE)
_REPEAT = LuaScript("request_repeat", _PACKAGE)
_RENEW = LuaScript("request_renew", _PACKAGE)
_ADOPT = LuaScript("request_adopt", _PACKAGE)
_STOP = LuaScript("request_stop", _PACKAGE)
_END = LuaScript("request_end", _PACKAGE)
_FORGET = LuaScript("request_forget", _PACKAGE)
_SEED = LuaScript("quota_seed", _PACKAGE)
_UNSEED = LuaScript("quota_unseed", _PACKAGE)
_STATUS = LuaScript("quota_status", _PACKAGE)
_EXPIRED = LuaScript("request_expired", _PACKAGE)
_AUDIT_OPEN = LuaScript("quota_audit_open", _PACKAGE)
_LIVE = LuaScript("request_live", _PACKAGE)

_STATUS_WIDTH = 6
_ADMITTED, _NEEDS_SEED, _REFUSED = 1, 0, -1
_STATUS_FIELDS = ("ends_as", "state", "owner", "term", "background", "settled")
_decode_numbers = msgspec.msgpack.Decoder(list[int]).decode
_decode_counts = msgspec.msgpack.Decoder(Counts).decode


class QuotaStore:
    """Operations on limits and reservations.

    All of them raise RedisError when Redis does not respond.
    """

    def __init__(self, executor: CommandExecutor) -> None:
        self._executor = executor
        self._processes = ServerProcesses()
        self._reserving = ScriptBatcher(self._reserve, most=MOST_SHARED)
        self._ending = ScriptBatcher(self._end_all, most=MOST_SHARED)

    async def reserve(
        self, request: ReservationRequest, *, lease_ms: int, extends: bool = False
    ) -> ReserveReply:
        """Reserve the maximum usage of the request in all limits, or in none.

        For a request that is already admitted, it reserves nothing and returns the first reply
        again. If it `extends` a reservation, it only adds the tokens that are not yet reserved.
        """
        packed = _packed(request.subjects, is_prepaid=request.is_prepaid)
        kind = _Kind(request.tenant_id, packed, lease_ms, extends)
        return await self._reserving.add(kind, request)

    async def _reserve(
        self, kind: "_Kind", requests: Sequence[ReservationRequest]
    ) -> list[ReserveReply]:
        bucket = keys.bucket_of(kind.tenant_id)
        described, *limits = kind.packed
        arguments: list[Argument] = [*limits]
        for each in requests:
            arguments += (
                each.request_id,
                each.prompt_tokens,
                each.completion_tokens,
                each.audio_seconds,
                each.cost_micros,
                each.record,
                b"" if each.kept is None else each.kept.encoded,
            )
        replies = await _ADMIT.run(
            self._executor,
            open_requests=keys.open_requests(bucket),
            keys=[keys.request(bucket, each.request_id) for each in requests],
            lease_ms=kind.lease_ms,
            extends=int(kind.extends),
            window_prefix=keys.window.prefix(bucket),
            running_prefix=keys.running.prefix(bucket),
            account_prefix=keys.account.prefix(bucket),
            described=described,
            arguments=arguments,
        )
        return [
            _reserve_reply(request, reply, is_extension=kind.extends)
            for request, reply in zip(requests, replies, strict=True)
        ]

    async def repeat(self, tenant_id: str, limit: SpendLimit, digest: bytes, *, by: int = 1) -> int:
        """Count a request among the equal ones in the limit's current window, or take it back.

        Return how often it was sent. Requests that are repeated least are forgotten after 128
        others.
        """
        bounds = limit.bounds_at(clock.now_ms())
        return int(
            await _REPEAT.run(
                self._executor,
                repeats=_repeats_of(tenant_id, limit, bounds),
                digest=digest,
                by=by,
                ends_ms=bounds.end * 1000,
            )
        )

    async def most_repeated(self, tenant_id: str, limits: Sequence[SpendLimit]) -> list[int]:
        """Return how often the request was sent that is repeated most in each limit's window."""
        now_ms, execute = clock.now_ms(), self._executor.execute_command

        async def count(name: str) -> int:
            most = await execute("ZREVRANGE", name, 0, 0)
            return int(float(await execute("ZSCORE", name, most[0]) or 0)) if most else 0

        names = (_repeats_of(tenant_id, each, each.bounds_at(now_ms)) for each in limits)
        return await asyncio.gather(*map(count, names))

    async def was_replaced(self) -> bool:
        """Return whether a Redis was replaced since the last call, as `ServerProcesses` says."""
        return await self._processes.have_changed(self._executor)

    async def claim(
        self,
        tenant_id: str,
        request_id: str,
        kept: Kept,
        *,
        in_place_of: str = "",
    ) -> Claim:
        """Let the Idempotency-Key of `kept` stand for a request, unless it stands for another one.

        The request replaces `in_place_of`, unless that is running by now. Return the request for
        which the key stands.
        """
        bucket = keys.bucket_of(tenant_id)
        claimed, body_digest, state, gateway, age_ms = await _CLAIM.run(
            self._executor,
            entry=kept.entry,
            record=keys.request(bucket, request_id),
            id=request_id,
            body=kept.body_digest,
            gateway=kept.owner,
            retention_ms=kept.retention_ms,
            in_place_of=in_place_of,
            record_prefix=keys.request.prefix(bucket),
        )
        return Claim(
            claimed.decode(),
            body_digest.decode(),
            RequestState(state.decode()),
            gateway.decode(),
            int(age_ms),
        )

    async def read(self, tenant_id: str, request_id: str) -> RequestStatus | None:
        """Return the record of a request; None if it does not exist, or no response is kept."""
        key = keys.request(keys.bucket_of(tenant_id), request_id)
        fields = await self._executor.execute_command("HMGET", key, *_STATUS_FIELDS)
        ends_as, state, owner, term, background, settled = fields
        if owner is None:
            return None
        state = ends_as or state
        return RequestStatus(
            RequestState.RUNNING if state is None else RequestState(state.decode()),
            owner.decode(),
            int(term),
            background == b"1",
            _decode_counts(settled) if settled else Counts(),
        )

    async def end(self, ending: RequestEnd) -> bool:
        """End a request: settle it with its actual usage, or release it as if it never existed.

        A settlement appends its record for the ledger, which adds what it has more than earlier
        ones of the request. A request that arrives after its release reserves nothing. Return False
        if the request was not running any more: a settlement by the owner is appended even then,
        unless an earlier one has ended the request, or it has another owner.
        """
        record, kept = ending.record, ending.kept
        own = _Ending(
            ending.request_id,
            "" if ending.expired_ms is None else ending.expired_ms,
            state="" if ending.state is None else ending.state,
            settled=msgspec.msgpack.encode(ending.settled) if any(ending.settled) else b"",
            kept=b"" if kept is None else kept.encoded,
            stored_bytes="" if ending.stored_bytes is None else ending.stored_bytes,
        )
        if record is not None:
            own = own._replace(
                event="settle",
                prompt=record.prompt_tokens,
                completion=record.completion_tokens,
                audio=record.audio_seconds,
                cost=record.cost_micros,
                record=encode_usage(record.for_ledger),
                owners=_encoded_owners(record.owners, record.spend_limits),
            )
        return await self._ending.add(ending.tenant_id, own)

    async def stop(self, tenant_id: str, request_id: str, term: int, state: RequestState) -> None:
        """Show a running request as ended, while its jobs stop and it is not settled yet."""
        await _STOP.run(
            self._executor,
            record=keys.request(keys.bucket_of(tenant_id), request_id),
            term=term,
            ends_as=state,
        )

    async def cancel(self, tenant_id: str, request_id: str, kept: Kept) -> bool:
        """Cancel a paused request of this term, which then does not resume."""
        cancelled = _Ending(
            request_id, "", event="cancel", state=RequestState.CANCELLED, kept=kept.encoded
        )
        return await self._ending.add(tenant_id, cancelled)

    async def forget(self, tenant_id: str, request_id: str, *, most_ms: int | None = None) -> None:
        """Forget an ended request, because its response is deleted. Its bytes are free then.

        Its Idempotency-Key stays taken as long as before, or for `most_ms`.
        """
        bucket = keys.bucket_of(tenant_id)
        await _FORGET.run(
            self._executor,
            record=keys.request(bucket, request_id),
            most_ms="" if most_ms is None else most_ms,
            ends_prefix=keys.stored_ends.prefix(bucket),
            bytes_prefix=keys.stored_bytes.prefix(bucket),
        )

    async def set_aside(self, bucket: int, unreadable: ExpiredReservation) -> bool:
        """Release a request whose draft cannot be read; keep the draft for operators."""
        aside = keys.unreadable_usage(bucket)
        request_id, _, draft, expired_ms = unreadable
        await self._executor.execute_command("HSET", aside, request_id, draft)
        paused = _Ending(request_id, expired_ms, state=RequestState.PAUSED)
        [is_released] = await self._end_in(bucket, [paused])
        return is_released

    async def _end_all(self, tenant_id: str, endings: Sequence["_Ending"]) -> list[bool]:
        return await self._end_in(keys.bucket_of(tenant_id), endings)

    async def _end_in(self, bucket: int, endings: Sequence["_Ending"]) -> list[bool]:
        ended = await _END.run(
            self._executor,
            open_requests=keys.open_requests(bucket),
            usage_records=keys.usage(bucket),
            keys=[keys.request(bucket, each.request_id) for each in endings],
            window_prefix=keys.window.prefix(bucket),
            running_prefix=keys.running.prefix(bucket),
            account_prefix=keys.account.prefix(bucket),
            ends_prefix=keys.stored_ends.prefix(bucket),
            bytes_prefix=keys.stored_bytes.prefix(bucket),
            arguments=chain.from_iterable(endings),
        )
        return [bool(each) for each in ended]

    async def renew(
        self, bucket: int, request_ids: Iterable[str], *, owner: str, lease_ms: int
    ) -> list[str]:
        """Renew the leases of running requests. Return the ids of those without a record."""
        unknown = await _RENEW.run(
            self._executor,
            open_requests=keys.open_requests(bucket),
            record_prefix=keys.request.prefix(bucket),
            running_prefix=keys.running.prefix(bucket),
            lease_ms=lease_ms,
            owner=owner,
            arguments=request_ids,
        )
        return [request_id.decode() for request_id in unknown]

    async def adopt(self, request: ReservationRequest, kept: Kept, *, lease_ms: int) -> int | None:
        """Begin the term of `kept` of a running request, with its owner and the draft of `request`.

        Return the completion tokens that it reserves; None if the request is not running, or not of
        the term before.
        """
        bucket = keys.bucket_of(request.tenant_id)
        reserved: int = await _ADOPT.run(
            self._executor,
            record=keys.request(bucket, request.request_id),
            open_requests=keys.open_requests(bucket),
            running_prefix=keys.running.prefix(bucket),
            id=request.request_id,
            lease_ms=lease_ms,
            term=kept.term,
            owner=kept.owner,
            draft=request.record,
        )
        return None if reserved < 0 else reserved

    async def seed(
        self,
        tenant_id: str,
        subject: SubjectLimits,
        numbers: AccountNumbers,
        *,
        version: int,
        stays_ms: int = ACCOUNT_MS,
    ) -> bool:
        """Write a subject's usage of durable limits in a day and a period.

        They stay for `stays_ms`, unless requests change them. Return False, without a write, if the
        subject is already seeded or its version has changed.
        """
        bucket = keys.bucket_of(tenant_id)
        seeded = await _SEED.run(
            self._executor,
            account=keys.account(bucket, subject.subject),
            accounts=keys.accounts(bucket),
            subject=subject.subject,
            version=version,
            day=numbers.day,
            requests=numbers.requests,
            tokens=numbers.tokens,
            audio=numbers.audio_seconds,
            month=numbers.month,
            cost=numbers.cost_micros,
            credit="" if numbers.credit_micros is None else numbers.credit_micros,
            stays_ms=stays_ms,
        )
        return bool(seeded)

    async def unseed(self, tenant_id: str, subject: str) -> bool:
        """Mark a subject's (`t:acme`) durable counters to be derived again.

        Return False if already marked.
        """
        account = keys.account(keys.bucket_of(tenant_id), subject)
        return bool(await _UNSEED.run(self._executor, account=account))

    async def status(
        self, tenant_id: str, subjects: Sequence[SubjectLimits]
    ) -> list[SubjectStatus]:
        """Return the usage of one or more subjects of one tenant."""
        bucket = keys.bucket_of(tenant_id)
        script_keys = [key for s in subjects for key in _keys_of(bucket, s.subject)]
        now_ms, *rest = await _STATUS.run(self._executor, keys=script_keys)
        return [
            SubjectStatus.from_reply(now_ms, row, period=period_of(subject, now_ms))
            for subject, row in zip(subjects, _rows(rest, _STATUS_WIDTH), strict=True)
        ]

    async def credits(self, tenant_ids: Sequence[str]) -> dict[str, int]:
        """Return the micro-dollars that prepaid tenants have left, minus what is reserved.

        Tenants whose balance is not derived at the moment are absent: they sent no request lately.
        """
        found: dict[str, int] = {}
        for start in range(0, len(tenant_ids), OPEN_AT_ONCE):
            some = tenant_ids[start : start + OPEN_AT_ONCE]
            accounts = (
                keys.account(keys.bucket_of(each), subject_of(LimitScope.TENANT, each))
                for each in some
            )
            replies = await asyncio.gather(
                *(
                    self._executor.execute_command("HMGET", account, "seeded", FIELD)
                    for account in accounts
                )
            )
            for tenant_id, (seeded, packed) in zip(some, replies, strict=True):
                if seeded is None or packed is None:
                    continue
                account = AccountNumbers.decode(packed)
                if account.credit_micros is not None:
                    found[tenant_id] = account.credit_micros - account.reserved_credit_micros
        return found

    async def expired(
        self, bucket: int, *, most: int = 100, skip: int = 0
    ) -> list[ExpiredReservation]:
        """Return open reservations whose lease has expired, longest expired first.

        `skip` of them are left out.
        """
        reply = await _EXPIRED.run(
            self._executor,
            open_requests=keys.open_requests(bucket),
            record_prefix=keys.request.prefix(bucket),
            most=most,
            skip=skip,
        )
        return [
            ExpiredReservation(request_id.decode(), int(created_ms), record, int(expired_ms))
            for request_id, created_ms, record, expired_ms in _rows(reply, 4)
        ]

    async def live(self, tenant_id: str) -> LiveReservations:
        """Return the open reservations of a tenant, oldest first."""
        bucket = keys.bucket_of(tenant_id)
        open_requests = keys.open_requests(bucket)
        # One more than is read shows whether there are more.
        ids: list[bytes] = await self._executor.execute_command(
            "ZRANGE", open_requests, 0, MOST_OPEN
        )
        found: list[tuple[int, str]] = []
        for start in range(0, min(len(ids), MOST_OPEN), OPEN_AT_ONCE):
            some = ids[start : min(start + OPEN_AT_ONCE, MOST_OPEN)]
            reply = await _LIVE.run(
                self._executor,
                keys=[open_requests],
                record_prefix=keys.request.prefix(bucket),
                subject=subject_of(LimitScope.TENANT, tenant_id),
                arguments=some,
            )
            found += [(int(ms), request_id.decode()) for request_id, ms in _rows(reply, 2)]
        return LiveReservations(sorted(found), is_complete=len(ids) <= MOST_OPEN)

    async def draft(self, tenant_id: str, request_id: str) -> UsageRecord | None:
        """Return the draft of an open reservation's record; None if the tenant has none."""
        key = keys.request(keys.bucket_of(tenant_id), request_id)
        created_ms, content = await self._executor.execute_command(
            "HMGET", key, "created_ms", "record"
        )
        draft = readable_usage(content)
        if created_ms is None or draft is None or draft.tenant_id != tenant_id:
            return None
        return msgspec.structs.replace(draft, request_id=request_id, created_ms=int(created_ms))

    async def living(self, gateways: set[str]) -> set[str]:
        """Return those gateways that have a heartbeat, or whose server does not respond."""
        names = sorted(gateways)
        beats = await asyncio.gather(
            *(self._executor.execute_command("EXISTS", keys.gateway_alive(n)) for n in names),
            return_exceptions=True,
        )
        return {name for name, lives in zip(names, beats, strict=True) if lives}

    async def audit_open(self, bucket: int) -> AuditResult:
        """Correct the amounts that subjects of a bucket hold for open reservations."""
        reply = await _AUDIT_OPEN.run(
            self._executor,
            open_requests=keys.open_requests(bucket),
            accounts=keys.accounts(bucket),
            record_prefix=keys.request.prefix(bucket),
            running_prefix=keys.running.prefix(bucket),
            account_prefix=keys.account.prefix(bucket),
        )
        return AuditResult(*reply)

    async def undrained(
        self, bucket: int, *, after: str = "-"
    ) -> tuple[list[UsageRecord], str | None]:
        """Return usage records that may not be in the ledger yet, and the start of the next page.

        A record that cannot be read never reaches the ledger, so it is not returned either.
        """
        page = await self._executor.execute_command(
            "XRANGE", keys.usage(bucket), after, "+", "COUNT", USAGE_PAGE
        )
        records = [record for _, fields in page if (record := readable_usage(fields.get(b"u")))]
        return records, f"({page[-1][0].decode()}" if len(page) == USAGE_PAGE else None


def _repeats_of(tenant_id: str, limit: SpendLimit, bounds: Bounds) -> str:
    return keys.repeats(keys.bucket_of(tenant_id), f"{limit.id}:{bounds.start}")


class _Kind(NamedTuple):
    """What requests have in common that one run reserves together."""

    tenant_id: str
    packed: tuple[bytes, ...]
    """Their subjects and limits."""
    lease_ms: int
    extends: bool


class _Ending(NamedTuple):
    """The arguments of `request_end` for a request."""

    request_id: str
    expired_at: int | str
    event: str = "release"
    prompt: int = 0
    completion: int = 0
    audio: int = 0
    cost: int = 0
    record: bytes = b""
    owners: bytes = b""
    state: str = ""
    settled: bytes = b""
    kept: bytes = b""
    stored_bytes: int | str = ""


@lru_cache(maxsize=10_000)
def _encoded_owners(
    owners: tuple[tuple[LimitScope, str | None], ...], spend_limits: tuple[str, ...]
) -> bytes:
    names = [subject_of(scope, id_) for scope, id_ in owners if id_ is not None]
    return msgspec.msgpack.encode([*names, *spend_limits])


def _keys_of(bucket: int, subject: str) -> tuple[str, str, str]:
    return (
        keys.window(bucket, subject),
        keys.running(bucket, subject),
        keys.account(bucket, subject),
    )


@lru_cache(maxsize=10_000)
def _packed(subjects: tuple[SubjectLimits, ...], *, is_prepaid: bool) -> tuple[bytes, ...]:
    """Return the arguments that describe subjects and limits: packed numbers cost Redis least."""
    limits = [each.limits for each in subjects]
    spending = [each.spending is not None and each.spending.bounds for each in subjects]
    described = (
        [each.subject for each in subjects],
        _flags(any(value is not None for value in each.reserved()[:4]) for each in limits),
        _flags(
            each.limits.is_durable or (is_prepaid and each.scope is LimitScope.TENANT)
            for each in subjects
        ),
        _flags(each.concurrent_requests is not None for each in limits),
        is_prepaid,
        *([spending] if any(spending) else []),
    )
    return (
        msgspec.msgpack.encode(described),
        *(
            struct.pack(">9d", *(math.inf if value is None else value for value in each.reserved()))
            for each in limits
        ),
    )


def _flags(values: Iterable[bool]) -> str:
    return "".join(str(int(value)) for value in values)


def _reserve_reply(
    request: ReservationRequest, reply: list[Any], *, is_extension: bool
) -> ReserveReply:
    code, *rest = reply
    subjects = request.subjects
    if code == _ADMITTED:
        return Admitted(rest[0], Remaining(subjects, _decode_numbers(rest[1])))
    if code == _NEEDS_SEED:
        return NeedsSeed(tuple(subjects[number - 1] for number in rest))
    if code == _REFUSED:
        refused = _refused(request, rest)
        # What is missing may be less than what the request has used and needs in all.
        return refused._replace(wanted=0) if is_extension else refused
    return Withdrawn()


def _refused(request: ReservationRequest, reply: list[Any]) -> Refused:
    _, number, subject, value, used, wait, remaining = reply
    holder = request.subjects[subject - 1]
    limit = RESERVED_LIMITS[number - 1] if number <= len(RESERVED_LIMITS) else None
    if limit is None and holder.spending is not None:
        limit = LimitName.BUDGET
    return Refused(
        holder,
        limit,
        value,
        used,
        request.wanted(limit),
        None if wait == -1 else wait,
        Remaining(request.subjects, _decode_numbers(remaining)),
    )


def _rows(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (values[i : i + size] for i in range(0, len(values), size))
