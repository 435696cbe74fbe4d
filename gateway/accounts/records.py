"""Tenants, and what belongs to them, as the rooms hand it to each other."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network
from typing import TypedDict

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.accounts.limits import LimitChanges, LimitScope, LimitValues
from gateway.accounts.scopes import Scope

Network = IPv4Network | IPv6Network


class TenantStatus(StrEnum):
    """Whether a tenant is served."""

    ACTIVE = "active"  # Its credentials work.
    SUSPENDED = "suspended"  # Every request is refused with 403 until it is activated again.


class Billing(StrEnum):
    """When a tenant pays."""

    POSTPAID = "postpaid"  # Later, by what the ledger says.
    PREPAID = "prepaid"  # Before: without credits nothing is served.


class ProjectStatus(StrEnum):
    """Whether the keys of a project work."""

    ACTIVE = "active"
    ARCHIVED = "archived"


class Role(StrEnum):
    """What a member may do in a tenant; see `gateway.accounts.roles.ROLE_SCOPES`."""

    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    BILLING = "billing"
    VIEWER = "viewer"


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
    plan_id: str | None = None
    """Where limits come from that neither tenant, project nor key sets."""
    limits: LimitValues = field(default_factory=dict)
    billing: Billing = Billing.POSTPAID
    service_tier: ServiceTier = ServiceTier.DEFAULT
    """The tier of requests that name none."""
    shows_cost: bool = False
    """Whether answers say what they cost."""


class TenantOptions(TypedDict, total=False):
    """What a tenant may be given beside its name and weight."""

    dialect: Dialect | None
    strict_parameters: bool
    default_model: str | None
    plan_id: str | None
    limits: LimitChanges
    billing: Billing
    service_tier: ServiceTier
    shows_cost: bool


class TenantChanges(TenantOptions, total=False):
    """What may be changed of a tenant; what is absent stays as it is."""

    name: str
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Limits for everybody who has none of their own."""

    id: str
    name: str
    limits: Mapping[LimitScope, LimitValues]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A part of a tenant, with keys and limits of its own."""

    id: str
    tenant_id: str
    name: str
    status: ProjectStatus
    created_at: datetime
    limits: LimitValues = field(default_factory=dict)


class ProjectChanges(TypedDict, total=False):
    """What may be changed of a project; what is absent stays as it is."""

    name: str
    limits: LimitChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A person of a tenant, who comes with a JWT."""

    id: str
    tenant_id: str
    subject: str
    """The claim `sub` of the person's tokens."""
    name: str
    role: Role
    created_at: datetime


class _KeyOptions(TypedDict, total=False):
    dialect: Dialect | None
    allowed_models: Collection[str] | None
    allowed_addresses: tuple[Network, ...] | None
    expires_at: datetime | None
    limits: LimitChanges


class KeyOptions(_KeyOptions, total=False):
    """What may be changed of a key; what is absent stays as it is."""

    name: str
    scopes: frozenset[Scope]


class NewKeyOptions(_KeyOptions, total=False):
    """What a key may be given beside its name and scopes."""

    project_id: str | None


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
    project_id: str | None = None
    allowed_addresses: tuple[Network, ...] | None = None
    """Where requests may come from; None stands for anywhere."""
    limits: LimitValues = field(default_factory=dict)
    old_prefix: str | None = None
    """Of the key's former secret, which works until `old_expires_at` after a rotation."""
    old_digest: bytes | None = field(default=None, repr=False)
    old_expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a model costs from some time on: micro-dollars per million tokens."""

    id: int
    model: str
    service_tier: ServiceTier
    prompt_micros: int
    cached_micros: int
    """For prompt tokens found in the prefix cache; at most `prompt_micros`."""
    completion_micros: int
    effective_at: datetime
    created_at: datetime


class CreditKind(StrEnum):
    """Why a balance of credits changed, apart from usage."""

    GRANT = "grant"
    ADJUSTMENT = "adjustment"
    EXPIRY = "expiry"  # What was left of a grant when it expired.


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """One change of a tenant's prepaid balance."""

    id: str
    tenant_id: str
    kind: CreditKind
    amount_micros: int
    """Negative where it takes something away."""
    note: str
    created_at: datetime
    expires_at: datetime | None = None
    """When what is left of a grant is taken back; None: never."""
    grant_id: str | None = None
    """The grant that an expiry ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """Where a tenant wants to be told that a budget is nearly used up."""

    id: str
    tenant_id: str
    url: str
    thresholds: tuple[int, ...]
    """Percentages of a budget."""
    created_at: datetime
    secret: str = field(default="", repr=False)
    """Signs what is sent; known only when the webhook is made."""
