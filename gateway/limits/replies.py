"""Request and reply types of the quota scripts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, cast

import msgspec

from gateway.limits.counters import AccountNumbers, Period, day_of
from gateway.records.limits import RESERVED_LIMITS, LimitName, LimitScope, SubjectLimits
from gateway.records.usage_record import Counts, UsageRecord, encode_usage


class RequestState(StrEnum):
    """State of a request that has a record. `_states.lua` has the transitions."""

    CLAIMED = "claimed"  # It has an Idempotency-Key, and is not admitted yet.
    RUNNING = "running"  # It is admitted; its owner may be dead.
    PAUSED = "paused"  # Nobody waits for it, and it is settled; it resumes when a client attaches.
    FINISHED = "finished"
    FAILED = "failed"  # It ended with an error, which its readers receive.
    CANCELLED = "cancelled"  # A client cancelled it.
    RELEASED = "released"  # It was not admitted, or another request has its key.
    DELETED = "deleted"  # A client deleted its response.

    @property
    def is_end(self) -> bool:
        """Whether no more output follows."""
        return self not in (RequestState.CLAIMED, RequestState.RUNNING, RequestState.PAUSED)


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """The owner of a request whose response is kept, and for how long."""

    owner: str
    """The gateway that follows its jobs, or the last one that did."""
    term: int
    """Number of its owner, counted from 1 and incremented by each takeover."""
    is_background: bool
    """Whether it continues without a connected client."""
    retention_ms: int
    """How long its record stays after its end."""
    entry: str = ""
    """Redis key of its Idempotency-Key; empty if it has none."""
    body_digest: str = ""
    stored_for: tuple[str, ...] = ()
    """Subjects for which the bytes count that Redis stores for it."""

    @property
    def encoded(self) -> bytes:
        """The argument of the scripts."""
        # A script cannot write a boolean.
        owner, term, is_background, *others = msgspec.structs.astuple(self)
        return msgspec.msgpack.encode((owner, term, int(is_background), *others))


class RequestStatus(NamedTuple):
    """The record of a request whose response is kept, as it was read."""

    state: RequestState
    owner: str
    term: int
    is_background: bool
    settled: Counts
    """Token counts in earlier records of its usage, which are not charged again."""


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request: settled with a usage record, or released without one."""

    tenant_id: str
    request_id: str
    record: UsageRecord | None = None
    kept: Kept | None = None
    """None if its response is not kept, or if the sweep ends it."""
    state: RequestState | None = None
    """The state that its record has then; None if nothing of the request remains."""
    settled: Counts = Counts()
    """Of a paused request."""
    stored_bytes: int | None = None
    """Bytes of a kept response; None leaves them as they are."""
    expired_ms: int | None = None
    """Only end a request whose lease expired at that time, and was not renewed since."""


class Claim(NamedTuple):
    """The request for which an Idempotency-Key stands."""

    request_id: str
    body_digest: str
    state: RequestState
    gateway: str
    age_ms: int
    """Milliseconds since it claimed the key, or was admitted."""


class ReservationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum usage of one request, and the subjects whose limits apply to it."""

    request_id: str
    tenant_id: str
    subjects: tuple[SubjectLimits, ...]
    """Key, project and tenant, in this order, including those without any limit."""
    prompt_tokens: int
    completion_tokens: int
    audio_seconds: int = 0
    cost_micros: int
    is_prepaid: bool
    record: bytes
    """Draft of the usage record, for the process that settles it if this process cannot."""
    kept: Kept | None = None
    """None if its response is not kept."""

    @classmethod
    def of(
        cls,
        draft: UsageRecord,
        subjects: tuple[SubjectLimits, ...],
        most: Counts,
        *,
        kept: Kept | None = None,
    ) -> "ReservationRequest":
        """Request at most so much, at the prices in the draft of the usage record."""
        return cls(
            request_id=draft.admitted_id,
            kept=kept,
            tenant_id=draft.tenant_id,
            subjects=subjects,
            prompt_tokens=most.prompt_tokens,
            completion_tokens=most.completion_tokens,
            audio_seconds=most.audio_seconds,
            cost_micros=draft.cost_of(*most._replace(cached_tokens=0)),
            is_prepaid=draft.is_prepaid,
            record=encode_usage(draft),
        )

    def wanted(self, limit: LimitName | None) -> int:
        """Return how much of a limit the request takes; None means the prepaid credit."""
        match limit:
            case LimitName.PROMPT_TOKENS_PER_MINUTE:
                return self.prompt_tokens
            case LimitName.COMPLETION_TOKENS_PER_MINUTE:
                return self.completion_tokens
            case LimitName.TOKENS_PER_MINUTE | LimitName.TOKENS_PER_DAY:
                return self.prompt_tokens + self.completion_tokens
            case LimitName.AUDIO_SECONDS_PER_DAY:
                return self.audio_seconds
            case LimitName.BUDGET | None:
                return self.cost_micros
            case _:
                return 1


SeesUse = Callable[[LimitScope], bool]
"""Whether a caller may see the money used by its key, its project or its tenant."""


def sees_all(_scope: LimitScope) -> bool:
    """Show the usage of all holders."""
    return True


def sees_key(scope: LimitScope) -> bool:
    """Show only the usage of the key."""
    return scope is LimitScope.KEY


METERED: Final[tuple[LimitName | None, ...]] = (*RESERVED_LIMITS[:4], LimitName.BUDGET, None)
"""Limits whose remainders are reported: those per minute, the budget, and None for the credit."""
NO_LIMIT: Final = -1
"""The remainder where there is no limit."""


class Remaining(NamedTuple):
    """Remaining quota of the METERED limits of each subject."""

    subjects: tuple[SubjectLimits, ...]
    left: Sequence[int]
    """The values of the first subject, then the values of the next ones."""


class Admitted(NamedTuple):
    """The request is admitted and its maximum usage is reserved."""

    created_ms: int
    """Unix time of the admission in milliseconds, by the Redis clock."""
    remaining: Remaining


class Refused(NamedTuple):
    """A limit rejects the request; nothing is reserved."""

    subject: SubjectLimits
    limit: LimitName | None
    """None means the tenant's prepaid credit."""
    value: int
    used: int
    wanted: int
    retry_ms: int | None
    """Milliseconds until the limit allows the request; None: never or unknown.

    This assumes that nothing else is admitted.
    """
    remaining: Remaining = Remaining((), ())

    @property
    def is_too_large(self) -> bool:
        """Whether the request exceeds what the limit can ever allow."""
        return self.limit is not None and self.wanted > self.value


class NeedsSeed(NamedTuple):
    """The durable counters of these subjects must be read from the ledger first."""

    subjects: tuple[SubjectLimits, ...]


class Withdrawn(NamedTuple):
    """Nothing is reserved: the record has a state, or a term, from which that is no transition.

    The request was released before it arrived, has ended, or there is none to extend.
    """


ReserveReply = Admitted | Refused | NeedsSeed | Withdrawn


class ExpiredReservation(NamedTuple):
    """A reservation whose lease has expired."""

    request_id: str
    created_ms: int
    record: bytes
    """Draft of its usage record."""
    expired_ms: int
    """Expiry of its lease, as Unix time by the Redis clock."""


class LiveReservations(NamedTuple):
    """The open reservations of a tenant."""

    requests: list[tuple[int, str]]
    """When each was admitted, as Unix time in milliseconds, and its request id; oldest first."""
    is_complete: bool
    """Whether all reservations of the tenant's bucket were read."""


class AuditResult(NamedTuple):
    """Errors in open reservations that an audit found and corrected."""

    corrected_subjects: int
    orphaned_requests: int
    """Concurrent requests that had no reservation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectStatus:
    """Usage of a subject."""

    now_ms: int
    """Unix time by the Redis clock."""
    requests_of_minute: int
    prompt_tokens_of_minute: int
    completion_tokens_of_minute: int
    minute_reset_ms: int | None
    """Time until the first of them leaves the window; None if there is no usage."""
    concurrent_requests: int
    is_seeded: bool
    """Whether the counters below are complete."""
    version: int
    requests_today: int
    """Settled and reserved, as are the next three."""
    tokens_today: int
    audio_seconds_today: int
    cost_this_month: int
    """In the current window, if it is a spend limit."""
    reserved_this_month: int
    """The part of it that is only reserved."""
    credit_micros: int | None
    """Remaining credit of a prepaid tenant, minus reservations."""

    @classmethod
    def from_reply(
        cls, now_ms: int, reply: Sequence[int | list[bytes | None]], *, period: Period | None
    ) -> "SubjectStatus":
        """Parse one subject's part of the script's reply, which counts the cost in this period."""
        requests, prompt, completion, reset, running = cast("Sequence[int]", reply[:5])
        seeded, version, packed, audio = cast("list[bytes | None]", reply[5])
        account = AccountNumbers() if packed is None else AccountNumbers.decode(packed, audio)
        is_today = account.day == day_of(now_ms)
        is_this_month = period is not None and account.month == period.number
        credit = account.credit_micros
        return cls(
            now_ms=now_ms,
            requests_of_minute=requests,
            prompt_tokens_of_minute=prompt,
            completion_tokens_of_minute=completion,
            minute_reset_ms=None if reset == -1 else reset,
            concurrent_requests=running,
            is_seeded=seeded is not None,
            version=int(version or 0),
            requests_today=account.requests + account.reserved_requests if is_today else 0,
            tokens_today=account.tokens + account.reserved_tokens if is_today else 0,
            audio_seconds_today=account.audio_seconds + account.reserved_audio_seconds
            if is_today
            else 0,
            cost_this_month=account.cost_micros + account.reserved_micros if is_this_month else 0,
            reserved_this_month=account.reserved_micros if is_this_month else 0,
            credit_micros=None if credit is None else credit - account.reserved_credit_micros,
        )

    def used(self, name: LimitName) -> int:
        """Return the usage of a limit."""
        used = {
            LimitName.REQUESTS_PER_MINUTE: self.requests_of_minute,
            LimitName.TOKENS_PER_MINUTE: self.prompt_tokens_of_minute
            + self.completion_tokens_of_minute,
            LimitName.PROMPT_TOKENS_PER_MINUTE: self.prompt_tokens_of_minute,
            LimitName.COMPLETION_TOKENS_PER_MINUTE: self.completion_tokens_of_minute,
            LimitName.REQUESTS_PER_DAY: self.requests_today,
            LimitName.TOKENS_PER_DAY: self.tokens_today,
            LimitName.AUDIO_SECONDS_PER_DAY: self.audio_seconds_today,
            LimitName.CONCURRENT_REQUESTS: self.concurrent_requests,
            LimitName.BUDGET: self.cost_this_month,
        }
        return used[name]
