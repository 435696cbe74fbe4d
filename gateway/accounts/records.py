"""Tenants and keys as the rooms hand them to each other."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from gateway.accounts.scopes import Scope


class TenantStatus(StrEnum):
    """Whether a tenant is served."""

    ACTIVE = "active"  # Its credentials work.
    SUSPENDED = "suspended"  # Every request is refused with 403 until it is activated again.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A paying customer."""

    id: str
    name: str
    weight: float
    """Share of the workers relative to other tenants that have work waiting."""
    status: TenantStatus
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """What is known about an API key, apart from the key itself."""

    id: str
    tenant_id: str
    prefix: str
    digest: bytes = field(repr=False)
    name: str
    scopes: frozenset[Scope]
    allowed_models: frozenset[str] | None
    """None stands for all models."""
    expires_at: datetime | None
    revoked_at: datetime | None
    created_at: datetime
