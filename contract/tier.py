"""Service tiers: the urgency of a request, for which its tenant pays."""

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Final, Literal


class ServiceTier(StrEnum):
    """Orders the jobs of one tenant and changes the tenant's share of the workers within bounds."""

    BATCH = "batch"
    FLEX = "flex"
    DEFAULT = "default"
    PRIORITY = "priority"

    # Enum computes the hash in Python, several times for each request.
    __hash__ = str.__hash__


RequestTier = Literal[ServiceTier.FLEX, ServiceTier.DEFAULT, ServiceTier.PRIORITY]
"""A tier that a request or a tenant may select. Only batches use the other one."""


class Lane(Enum):
    """A part of a model's queue with its own order, bounds and service counters.

    Workers claim from the batch lane only when the other one is empty. The value is the part of the
    lane's keys that distinguishes them.
    """

    REQUESTS = ""
    BATCH = "batch:"

    __hash__ = object.__hash__


def lane_of(tier: ServiceTier) -> Lane:
    """Return the lane in which jobs of a tier wait."""
    return Lane.BATCH if tier is ServiceTier.BATCH else Lane.REQUESTS


REQUEST_TIERS: Final = tuple(tier for tier in ServiceTier if tier is not ServiceTier.BATCH)
"""The tiers of RequestTier."""

TIER_RANKS: Final[Mapping[ServiceTier, int]] = {
    ServiceTier.PRIORITY: 0,
    ServiceTier.DEFAULT: 1,
    ServiceTier.FLEX: 2,
    ServiceTier.BATCH: 3,
}
"""Rank of a tier within the tenant's queue; the lowest rank goes first."""

TIER_BOOSTS: Final[Mapping[ServiceTier, float]] = {
    ServiceTier.PRIORITY: 2.0,
    ServiceTier.DEFAULT: 1.0,
    ServiceTier.FLEX: 0.5,
    ServiceTier.BATCH: 1.0,
}
"""Factor on the tenant's weight; bounded, so that no tier starves another tenant."""
