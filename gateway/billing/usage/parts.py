"""Types of usage reports: dimensions, filters, sums and groups."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from contract.tier import ServiceTier
from gateway.records.usage_record import Outcome


class Dimension(StrEnum):
    """Dimensions by which usage can be grouped."""

    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"
    MODEL = "model"
    SERVICE_TIER = "service_tier"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Filter of usage; None means all."""

    tenant_id: str | None
    project_id: str | None = None
    credential_id: str | None = None
    model: str | None = None
    service_tier: ServiceTier | None = None
    outcomes: tuple[Outcome, ...] = ()
    """Of single requests; empty means all. Sums do not have it."""


class UsageSums(NamedTuple):
    """Sums over a set of requests."""

    requests: int
    failed_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    audio_seconds: int
    cost_micros: int

    @property
    def tokens(self) -> int:
        """Tokens of prompts and completions."""
        return self.prompt_tokens + self.completion_tokens


NOTHING: Final = UsageSums(*[0] * len(UsageSums._fields))


def add(parts: Iterable[UsageSums]) -> UsageSums:
    """Return the sum of sums."""
    return UsageSums(*map(sum, zip(NOTHING, *parts, strict=True)))
