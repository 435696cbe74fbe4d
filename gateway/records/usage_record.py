"""Usage records: one record per admitted request, however it ends."""

import operator
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from common import clock
from contract.tier import ServiceTier
from gateway.records.adapters import SEPARATOR
from gateway.records.limits import LimitScope, SpendScope, SubjectLimits, may_count

MICRO: Final = 1_000_000
"""Number of tokens that a price applies to, and micro-dollars in a dollar."""


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"  # The client disconnected or stopped reading, or it was cancelled.
    TIMED_OUT = "timed_out"  # It exceeded its time limit.
    FAILED = "failed"  # It ended with an error.
    LOST = "lost"  # Its gateway died.


LOST_CODE: Final = "gateway_lost"
"""Error code of a request whose gateway died."""


class Counts(NamedTuple):
    """Counts of a request, over all of its jobs."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Included in the prompt tokens."""
    completion_tokens: int = 0
    audio_seconds: int = 0

    @classmethod
    def total(cls, counts: Iterable["Counts"]) -> "Counts":
        """Return the sum of counts."""
        return cls(*map(sum, zip(*counts, strict=True)))


class UsageRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One request's usage, with the engine's counts and the price in force at its admission.

    Redis stores it as msgpack; fields may only be added, with defaults.
    """

    request_id: str
    """For a request that resumed after its settlement, the id ends with a period and a number."""
    tenant_id: str
    project_id: str | None
    credential_id: str
    """Id of the API key, or `jwt:` and the token's subject."""
    model: str
    """The model whose workers run the request."""
    endpoint: str
    dialect: str
    service_tier: ServiceTier = ServiceTier.DEFAULT
    is_streamed: bool = False
    is_ranked: bool = False
    """Whether its tokens arrive at the end, when the best sequences are known, even if streamed."""
    is_prepaid: bool = False
    """Whether the cost is taken from the tenant's credits."""
    gateway: str = ""
    line: str = ""
    """Batch and line number of a line of a batch, which pays only for a delivered result."""
    ledger_id: str = ""
    """Id of the request in the ledger, if it has another one in Redis for each time it runs."""
    adapter: str = ""
    """Name of the adapter with which it runs; empty for the model itself."""
    jobs: int = 1
    """Number of prompts in the request; see `job_ids`."""
    prompt_price: int = 0
    """Micro-dollars per million tokens, as are the other prices."""
    cached_price: int = 0
    completion_price: int = 0
    audio_price: int = 0
    """Micro-dollars per million seconds."""
    job_seconds: list[int] = []
    """In a draft, the seconds of audio of each job; empty if there is none."""
    created_ms: int = 0
    """Unix time of the admission, by the Redis clock."""
    ended_ms: int = 0
    outcome: Outcome = Outcome.LOST
    code: str = ""
    """Code of the error that ended the request; empty if none."""
    prompt_tokens: int = 0
    """In the draft of a resumed request, the count of its earlier settlement.

    The same applies to the next three.
    """
    cached_tokens: int = 0
    completion_tokens: int = 0
    audio_seconds: int = 0
    free_prompt_tokens: int = 0
    """Tokens above that the tenant does not pay for: the operator's fault ended their job."""
    free_cached_tokens: int = 0
    free_completion_tokens: int = 0
    free_audio_seconds: int = 0
    cost_micros: int = 0
    first_token_ms: int = 0
    """Milliseconds from the admission to the first reply of a worker; 0 if there was none."""
    engine: str = ""
    """Name and version of the engine that ran it; empty if unknown or if none did.

    Several ones are separated by commas, as after a resumption on a worker of another release.
    """
    preemptions: int = 0
    """How often its sequences left an engine to make room for others."""
    recomputed_tokens: int = 0
    """Completion tokens that they had, which engines process again; they count and cost once."""
    exactness_class: str = ""
    """Class of the engine that generated its tokens; empty if none did.

    Several ones are separated by commas, in the order of its jobs and of their tokens.
    """
    class_crossings: int = 0
    """How often an engine of another class continued one of its jobs."""
    end_user: str = ""
    """The end user whom the request names, if the tenant limits end users."""
    spend_limits: tuple[str, ...] = ()
    """Names in Redis of the spend limits that count it."""

    @property
    def full_model(self) -> str:
        """The model, with the adapter if there is one, as in the ledger."""
        return f"{self.model}{SEPARATOR}{self.adapter}" if self.adapter else self.model

    @property
    def admitted_id(self) -> str:
        """Id of the admitted request, of which a resumption has a record of its own."""
        return self.request_id.partition(".")[0]

    @property
    def job_ids(self) -> list[str]:
        """Ids of the request's jobs, one for each prompt."""
        return [f"{self.admitted_id}-{index}" for index in range(self.jobs)]

    @property
    def is_whole(self) -> bool:
        """Whether a client receives nothing before the end."""
        return self.is_ranked or not self.is_streamed

    def used(self, total: Counts) -> Counts:
        """Return the tokens that the record of a draft has, if its jobs have used `total`."""
        earlier = self.counts
        if not any(earlier):
            return total
        own = Counts(*(max(all_ - before, 0) for all_, before in zip(total, earlier, strict=True)))
        # An engine that reads a settled prompt again may find more of it in its cache.
        return own._replace(cached_tokens=min(own.cached_tokens, own.prompt_tokens))

    @property
    def counts(self) -> Counts:
        """What its jobs have used."""
        return Counts(*_counts_of(self))

    @property
    def paid(self) -> Counts:
        """What of it the tenant pays for."""
        return Counts(*map(operator.sub, self.counts, _free_counts_of(self)))

    @property
    def free_micros(self) -> int:
        """The cost of what the tenant does not pay for."""
        return self.cost_of(*_free_counts_of(self))

    def job_counts(self, job: int, prompt: int, cached: int, completion: int) -> Counts:
        """Return the counts of a job with so many tokens; an engine that began it read its audio.

        Args:
            job: Its index.
            prompt: Prompt tokens.
            cached: Prompt tokens found in the prefix cache.
            completion: Completion tokens.
        """
        seconds = self.job_seconds[job] if self.job_seconds and prompt else 0
        return Counts(prompt, cached, completion, seconds)

    def ended(
        self,
        total: Counts,
        *,
        free: Counts,
        outcome: Outcome,
        code: str,
        first_token_ms: int = 0,
        engines: Iterable[str] = (),
        preempted: Iterable[int] = (0, 0),
        classes: Iterable[Sequence[str]] = (),
    ) -> "UsageRecord":
        """Return the record of a draft that ends now.

        Its jobs have used `total`, on these engines. The tenant does not pay for the tokens `free`.
        `preempted` has the numbers of preemptions and of tokens computed again, and `classes` the
        exactness classes that continued each job, in order.
        """
        own = self.used(total)
        if any(free):
            # For a request that resumed after a settlement, free tokens may be among those settled
            # before.
            free = Counts(*map(min, own, free))
        paid = Counts(*map(operator.sub, own, free))
        preemptions, recomputed_tokens = preempted
        of_jobs = [each for each in classes if each]
        names = dict.fromkeys(name for each in of_jobs for name in each)
        return msgspec.structs.replace(
            self,
            **own._asdict(),
            **{f"free_{name}": number for name, number in free._asdict().items()},
            cost_micros=self.cost_of(*paid),
            outcome=outcome,
            code=code,
            ended_ms=clock.now_ms(),
            first_token_ms=first_token_ms,
            engine=", ".join(sorted({each for each in engines if each})),
            preemptions=preemptions,
            recomputed_tokens=recomputed_tokens,
            exactness_class=", ".join(names),
            class_crossings=sum(len(each) - 1 for each in of_jobs),
        )

    @property
    def for_ledger(self) -> "UsageRecord":
        """The record under its id in the ledger."""
        if not self.ledger_id:
            return self
        return msgspec.structs.replace(self, request_id=self.ledger_id, ledger_id="")

    @property
    def owners(self) -> tuple[tuple[LimitScope, str | None], ...]:
        """The key (or token), project and tenant whose limits apply, by id."""
        return (
            (LimitScope.KEY, self.credential_id),
            (LimitScope.PROJECT, self.project_id),
            (LimitScope.TENANT, self.tenant_id),
        )

    def counts_for(self, subject: SubjectLimits) -> bool:
        """Return whether a holder of limits of its tenant counts this request."""
        spending = subject.spending
        if spending is None:
            return dict(self.owners)[subject.scope] == subject.id
        return (
            spending.model in (None, self.full_model)
            and may_count(spending.scope, spending.holder, self.credential_id, self.project_id)
            and (spending.scope is not SpendScope.USER or spending.user == self.end_user)
        )

    def cost_of(
        self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, audio_seconds: int
    ) -> int:
        """Return the cost of these `Counts` in micro-dollars, rounded up once."""
        cost = (
            (prompt_tokens - cached_tokens) * self.prompt_price
            + cached_tokens * self.cached_price
            + completion_tokens * self.completion_price
            + audio_seconds * self.audio_price
        )
        return -(-cost // MICRO)


_counts_of: Final = operator.attrgetter(*Counts._fields)
_free_counts_of: Final = operator.attrgetter(*(f"free_{name}" for name in Counts._fields))

encode_usage = msgspec.msgpack.Encoder().encode
decode_usage = msgspec.msgpack.Decoder(UsageRecord).decode


def readable_usage(content: bytes | None) -> UsageRecord | None:
    """Decode a usage record; None if it cannot be read."""
    try:
        return None if content is None else decode_usage(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


BOUNDS_MS: Final = tuple(round(2 ** (3 + step / 2)) for step in range(35))
"""Upper bounds of the buckets, inclusive: 41 % apart, from 8 ms to 17 minutes.

One more bucket counts longer times. Each bucket is a column of the database, so that another bound
needs a migration.
"""


def quantile_ms(counts: Sequence[int], percent: int) -> int | None:
    """Return the time that this percentage of the requests did not exceed, in milliseconds.

    It is interpolated within its bucket. Longer times than the last bound count as that bound.
    Returns None without requests.

    Args:
        counts: Requests in each bucket, the last one included.
        percent: From 1 to 100.
    """
    wanted, before, low = sum(counts) * percent / 100, 0, 0
    if not wanted:
        return None
    for count, high in zip(counts, (*BOUNDS_MS, BOUNDS_MS[-1]), strict=True):
        if before + count >= wanted:
            return max(round(low + (high - low) * (wanted - before) / count), 1)
        before, low = before + count, high
    return BOUNDS_MS[-1]
