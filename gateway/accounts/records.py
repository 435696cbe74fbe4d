"""Tenants and keys as the rooms hand them to each other."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypedDict

from contract.dialect import Dialect
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
    dialect: Dialect | None = None
    """The dialect of requests that name none, unless the key has one of its own; None: the model's."""
    strict_parameters: bool = False
    """Whether parameters that would have no effect are refused instead of being listed in a header."""
    default_model: str | None = None
    """The model of requests that name none."""


class TenantOptions(TypedDict, total=False):
    """What may be changed of a tenant; what is absent stays as it is."""

    dialect: Dialect | None
    strict_parameters: bool
    default_model: str | None


class KeyOptions(TypedDict, total=False):
    """What may be changed of a key; what is absent stays as it is."""

    dialect: Dialect | None


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
    dialect: Dialect | None = None
    """The dialect of requests that name none; None: the tenant's."""
