"""Records of tenants and their objects, as passed between packages."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network
from typing import Final, NamedTuple, TypedDict

import msgspec

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.records.limits import LimitChanges, LimitScope, LimitValues
from gateway.records.scopes import Role, Scope

Network = IPv4Network | IPv6Network


class TenantStatus(StrEnum):
    """Whether a tenant is served."""

    ACTIVE = "active"  # Its credentials work.
    SUSPENDED = "suspended"  # Every request is rejected with 403 until it is activated again.


class Billing(StrEnum):
    """How a tenant pays."""

    POSTPAID = "postpaid"  # After use, by the ledger.
    PREPAID = "prepaid"  # In advance: without credits nothing is served.


class ProjectStatus(StrEnum):
    """Whether the keys of a project work."""

    ACTIVE = "active"
    ARCHIVED = "archived"


class AnomalyAction(StrEnum):
    """What happens to a key that spends a multiple of what it usually spends."""

    REPORT = "report"  # Webhooks receive an event.
    STOP = "stop"  # Its further requests in this hour are rejected, too.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A paying customer."""

    id: str
    name: str
    weight: float
    """Share of the workers relative to other tenants with waiting requests."""
    status: TenantStatus
    created_at: datetime
    dialect: Dialect | None = None
    """Dialect of requests without one, unless the key has its own; None: the model's."""
    strict_parameters: bool = False
    """Whether parameters without effect are rejected instead of listed in a header."""
    default_model: str | None = None
    """Model of requests without a model."""
    plan_id: str | None = None
    """Plan whose limits apply where tenant, project or key set none."""
    limits: LimitValues = field(default_factory=dict)
    billing: Billing = Billing.POSTPAID
    service_tier: ServiceTier = ServiceTier.DEFAULT
    """Service tier of requests without a tier."""
    shows_cost: bool = False
    """Whether responses contain their cost."""
    zero_retention: bool = False
    """Whether nothing of a request is kept after its end, but its usage record."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the tenant's keys, or `*`."""
    stripe_customer_id: str | None = None
    """Customer in Stripe to whom sinks of the kind `stripe` export the tenant's usage."""
    time_zone: str = "UTC"
    """IANA name of the time zone in which the windows of its spend limits begin."""
    anomaly_factor: int | None = None
    """A key that spends so many times of what it usually spends in an hour is an anomaly."""
    anomaly_repeats: int | None = None
    """A key that sends one request more often than this in an hour is an anomaly."""
    anomaly_action: AnomalyAction = AnomalyAction.STOP
    prompt_log_key: str | None = None
    """Public key in PEM by which its prompt log is encrypted; None: it never had a log."""
    prompt_log_days: int | None = None
    """How long an entry of its prompt log is kept; None: its requests are not logged."""

    @property
    def prompt_log(self) -> "PromptLog | None":
        """How its requests are logged; None if they are not."""
        if self.prompt_log_key is None or self.prompt_log_days is None:
            return None
        return PromptLog(self.prompt_log_key, self.prompt_log_days)


class PromptLog(msgspec.Struct, frozen=True, array_like=True):
    """How requests are logged for their tenant."""

    key: str
    days: int


class TenantOptions(TypedDict, total=False):
    """Options of a tenant in addition to its name and weight."""

    dialect: Dialect | None
    strict_parameters: bool
    default_model: str | None
    plan_id: str | None
    limits: LimitChanges
    billing: Billing
    service_tier: ServiceTier
    shows_cost: bool
    zero_retention: bool
    cors_origins: tuple[str, ...]
    stripe_customer_id: str | None
    time_zone: str
    anomaly_factor: int | None
    anomaly_repeats: int | None
    anomaly_action: AnomalyAction


class TenantChanges(TenantOptions, total=False):
    """Changes of a tenant; absent options stay unchanged."""

    name: str
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Limits for holders without their own limits."""

    id: str
    name: str
    limits: Mapping[LimitScope, LimitValues]
    spend_limits: Mapping[str, int] = field(default_factory=dict)
    """Micro-dollars of each tenant by SCOPE/WINDOW or SCOPE/WINDOW/MODEL."""
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A part of a tenant, with its own keys and limits."""

    id: str
    tenant_id: str
    name: str
    status: ProjectStatus
    created_at: datetime
    limits: LimitValues = field(default_factory=dict)


class ProjectChanges(TypedDict, total=False):
    """Changes of a project; absent options stay unchanged."""

    name: str
    limits: LimitChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A person of a tenant, who authenticates at an identity provider."""

    id: str
    tenant_id: str
    subject: str | None
    """The claim `sub` of the person's tokens; None until an invited person has logged in."""
    issuer: str | None
    """The issuer that uses this subject; None stands for the deployment's identity provider."""
    email: str | None
    """The address under which the person was invited, in lower case."""
    name: str
    role: Role
    created_at: datetime


class Person(NamedTuple):
    """A person whom an identity provider has authenticated."""

    issuer: str | None
    subject: str
    is_of_deployment: bool
    """Whether members without an issuer are people of this issuer."""


class _KeyOptions(TypedDict, total=False):
    dialect: Dialect | None
    allowed_models: Collection[str] | None
    allowed_addresses: tuple[Network, ...] | None
    expires_at: datetime | None
    limits: LimitChanges


class KeyOptions(_KeyOptions, total=False):
    """Changes of a key; absent options stay unchanged."""

    name: str
    scopes: frozenset[Scope]


class NewKeyOptions(_KeyOptions, total=False):
    """Options of a new key in addition to its name and scopes."""

    project_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """The stored data of an API key, without the key itself."""

    id: str
    tenant_id: str
    prefix: str
    digest: bytes = field(repr=False)
    name: str
    scopes: frozenset[Scope]
    allowed_models: frozenset[str] | None
    """None means all models."""
    expires_at: datetime | None
    revoked_at: datetime | None
    created_at: datetime
    dialect: Dialect | None = None
    """Dialect of requests without one; None: the tenant's."""
    project_id: str | None = None
    allowed_addresses: tuple[Network, ...] | None = None
    """Allowed source addresses of requests; None means any."""
    limits: LimitValues = field(default_factory=dict)
    old_prefix: str | None = None
    """Prefix of the key's former secret, which works until `old_expires_at` after a rotation."""
    old_digest: bytes | None = field(default=None, repr=False)
    old_expires_at: datetime | None = None


MAX_PRICE_MICROS: Final = 10**12
"""A dollar for one token: a higher price is a wrong unit."""


PRICE_MICROS: Final = ("prompt_micros", "cached_micros", "completion_micros", "audio_micros")
"""The amounts of a Price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of a model from a given time on: micro-dollars per million tokens."""

    id: int
    model: str
    service_tier: ServiceTier
    prompt_micros: int
    cached_micros: int
    """For prompt tokens found in the prefix cache; at most `prompt_micros`."""
    completion_micros: int
    audio_micros: int = 0
    """Per million seconds of audio."""
    effective_at: datetime
    created_at: datetime
    removed_at: datetime | None = None
    """When it stopped to apply, or, before `effective_at`, was withdrawn; None: it was not."""


MAX_AMOUNT_MICROS: Final = 10**15
"""One billion dollars: Redis scripts use doubles, which are exact up to 2**53."""


class CreditKind(StrEnum):
    """Why a balance of credits changed, apart from usage."""

    GRANT = "grant"
    ADJUSTMENT = "adjustment"
    EXPIRY = "expiry"  # The remaining part of a grant when it expired.


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """One change of a tenant's prepaid balance."""

    id: str
    tenant_id: str
    kind: CreditKind
    amount_micros: int
    """Negative for a deduction."""
    note: str
    created_at: datetime
    expires_at: datetime | None = None
    """When the remaining part of a grant is taken back; None: never."""
    grant_id: str | None = None
    """The grant that an expiry ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A tenant's webhook, which receives an event when a budget is almost used up."""

    id: str
    tenant_id: str
    url: str
    thresholds: tuple[int, ...]
    """Percentages of a budget."""
    created_at: datetime
    secret: str = field(default="", repr=False)
    """Signs the events; known only when the webhook is created."""
