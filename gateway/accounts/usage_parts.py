"""What a report on usage is asked for and made of."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Dimension(StrEnum):
    """What usage can be told apart by."""

    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"
    MODEL = "model"
    SERVICE_TIER = "service_tier"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Whose and which usage is asked for; None stands for all."""

    tenant_id: str | None
    project_id: str | None = None
    credential_id: str | None = None
    model: str | None = None


class UsageSums(NamedTuple):
    """Sums over some requests."""

    requests: int
    failed_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_micros: int


class UsageGroup(NamedTuple):
    """The sums of one bucket and one value of each dimension."""

    label: str
    """The bucket's beginning as ISO 8601, as far as the bucket is long; '' for the whole."""
    values: tuple[str, ...]
    """Of the dimensions, in their order; '' where requests had no project."""
    sums: UsageSums
