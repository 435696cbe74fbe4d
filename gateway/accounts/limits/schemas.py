"""Response bodies of limits and their usage."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field

from contract.tier import ServiceTier
from gateway.accounts.shared.fields import RecordBody
from gateway.limits.periods import DAY_MS, day_start_ms, month_start_ms
from gateway.limits.replies import SubjectStatus
from gateway.records.limits import LimitName, LimitScope, SubjectLimits
from gateway.records.records import Billing
from gateway.records.times import to_time

_LONGEST_MONTH_DAYS = 31
_PER_MINUTE = frozenset(
    {
        LimitName.REQUESTS_PER_MINUTE,
        LimitName.TOKENS_PER_MINUTE,
        LimitName.PROMPT_TOKENS_PER_MINUTE,
        LimitName.COMPLETION_TOKENS_PER_MINUTE,
    }
)

_AT_ANY_TIME = frozenset(
    {LimitName.CONCURRENT_REQUESTS, LimitName.STORED_BYTES, LimitName.BATCH_TOKENS}
)


class LimitBody(BaseModel):
    """One limit."""

    limit: int | None = Field(description="Null: no limit, and usage is not counted.")
    used: int | None = Field(
        description="Usage of ended requests, plus the maximum usage of running ones."
    )
    remaining: int | None
    resets_at: datetime | None = Field(
        description="When the day or month ends, or the oldest usage of the minute expires. Null "
        "for concurrent requests, stored bytes and batch tokens, and if the minute has no usage."
    )


class ScopeBody(BaseModel):
    """The holder of limits and its limits by name."""

    scope: LimitScope
    id: str
    limits: dict[LimitName, LimitBody]

    @classmethod
    def of(
        cls, subject: SubjectLimits, status: SubjectStatus, stored_bytes: int, batch_tokens: int
    ) -> Self:
        """Return the response body of one holder's limits."""
        counted = {LimitName.STORED_BYTES: stored_bytes, LimitName.BATCH_TOKENS: batch_tokens}
        limits = dict(_limits(subject, status, counted))
        return cls(scope=subject.scope, id=subject.id, limits=limits)


class CreditsBody(BaseModel):
    """Remaining credit of a prepaid tenant."""

    remaining_micros: int = Field(
        description="Micro-dollars, minus the maximum cost of running requests."
    )


class LimitsReport(BaseModel):
    """All limits that apply, and their current usage."""

    object: Literal["limits"] = "limits"
    tenant: str
    plan: str | None = Field(description="Plan whose limits apply where no own limit is set.")
    service_tier: ServiceTier = Field(description="Default for requests that specify none.")
    billing: Billing
    scopes: list[ScopeBody] = Field(description="Key, project and tenant; a request must meet all.")
    credits: CreditsBody | None = Field(description="Null unless the tenant is prepaid.")


class RefusalBody(RecordBody):
    """Equal rejections by a limit within a second."""

    object: Literal["refusal"] = "refusal"
    at: Annotated[datetime, BeforeValidator(to_time)] = Field(
        validation_alias="at_ms", description="When the first one was sent."
    )
    key: str = Field(
        validation_alias="credential_id", description="Id of the key, or `jwt:SUBJECT`."
    )
    project: str | None = Field(validation_alias="project_id")
    model: str
    code: str = Field(description="Code of the error.")
    limit: str
    scope: str = Field(description="Holder of the limit: key, project or tenant.")
    message: str = Field(description="Message of the first error.")
    times: int


class RefusalList(BaseModel):
    """The latest rejections by limits, newest first."""

    object: Literal["list"] = "list"
    data: list[RefusalBody]


class RefusalCount(BaseModel):
    """How many requests of a tenant were rejected with one error code."""

    tenant: str | None = Field(description="Null for requests without a valid credential.")
    code: str = Field(description="Code of the error.")
    requests: int


class RefusalCounts(BaseModel):
    """Rejected requests, the largest numbers first."""

    object: Literal["list"] = "list"
    data: list[RefusalCount]
    is_complete: bool = Field(
        description="False if small numbers are missing: of each hour or day, the 1,000 largest "
        "are summed, and the 1,000 largest sums are listed."
    )


def is_seed_needed(subject: SubjectLimits, status: SubjectStatus, *, is_prepaid: bool) -> bool:
    """Whether Redis lacks usage that the report of a holder shows."""
    has_credit = is_prepaid and subject.scope is LimitScope.TENANT
    if has_credit and status.credit_micros is None:
        return True
    return (has_credit or subject.limits.is_durable) and not status.is_seeded


def _limits(
    subject: SubjectLimits, status: SubjectStatus, counted: Mapping[LimitName, int]
) -> Iterator[tuple[LimitName, LimitBody]]:
    for name in LimitName:
        limit = subject.limits.get(name)
        if limit is None:
            yield name, LimitBody(limit=None, used=None, remaining=None, resets_at=None)
            continue
        used = counted[name] if name in counted else status.used(name)
        yield (
            name,
            LimitBody(
                limit=limit,
                used=used,
                remaining=max(limit - used, 0),
                resets_at=_resets_at(name, status),
            ),
        )


def _resets_at(name: LimitName, status: SubjectStatus) -> datetime | None:
    now_ms = status.now_ms
    if name in _PER_MINUTE:
        wait_ms = status.minute_reset_ms
        return None if wait_ms is None else to_time(now_ms + wait_ms)
    if name in _AT_ANY_TIME:
        return None
    if name is LimitName.BUDGET:
        in_next_month = month_start_ms(now_ms) + _LONGEST_MONTH_DAYS * DAY_MS
        return to_time(month_start_ms(in_next_month))
    return to_time(day_start_ms(now_ms) + DAY_MS)
