"""How urgent a request is, as its tenant pays for it."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class ServiceTier(StrEnum):
    """Orders a tenant's own jobs, and changes its share of the workers within bounds."""

    FLEX = "flex"
    DEFAULT = "default"
    PRIORITY = "priority"


TIER_RANKS: Final[Mapping[ServiceTier, int]] = MappingProxyType(
    {ServiceTier.PRIORITY: 0, ServiceTier.DEFAULT: 1, ServiceTier.FLEX: 2}
)
"""Place of a tier within its tenant's queue, the first one first."""

TIER_BOOSTS: Final[Mapping[ServiceTier, float]] = MappingProxyType(
    {ServiceTier.PRIORITY: 2.0, ServiceTier.DEFAULT: 1.0, ServiceTier.FLEX: 0.5}
)
"""Factor on the tenant's weight: bounded, so that no tier starves another tenant."""
