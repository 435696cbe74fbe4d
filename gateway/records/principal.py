"""The principal of a request: its tenant, credential and rights."""

from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.records.errors import AddressNotAllowedError, PermissionDeniedError
from gateway.records.grants import BOUNDS, Grant
from gateway.records.limits import JWT_PREFIX, Limits, LimitScope, SpendScope, SubjectLimits
from gateway.records.records import Network, PromptLog
from gateway.records.scopes import TENANT_SCOPES, Scope
from gateway.records.spending import SpendLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A tenant, acting through one of its credentials."""

    tenant_id: str
    tenant_weight: float
    credential_id: str
    """Id of the API key, or `jwt:` and the token's subject, or `oidc:` and an operator's, or `cli:`
    and the user of the command line."""
    scopes: frozenset[Scope]
    allowed_models: frozenset[str] | None
    """None means all models."""
    dialect: Dialect | None = None
    """The credential's dialect, or else the tenant's."""
    is_strict: bool = False
    """Whether requests with parameters that would have no effect are rejected."""
    default_model: str | None = None
    """The tenant's model for requests without a model."""
    project_id: str | None = None
    allowed_addresses: tuple[Network, ...] | None = None
    """Allowed source addresses of requests; None means any."""
    expires_at: datetime | None = None
    """Expiry of the key, or of its secret in use; None for a JWT, which only proves an identity."""
    is_former_secret: bool = False
    """Whether the secret in use was replaced, and works only for a grace period."""
    limits: tuple[SubjectLimits, ...] = ()
    """Limits of key, project and tenant, in this order; a JWT has no key."""
    spend_limits: tuple[SpendLimit, ...] = ()
    """Those that may apply to requests of the credential."""
    is_prepaid: bool = False
    service_tier: ServiceTier = ServiceTier.DEFAULT
    """Service tier for requests without a tier."""
    shows_cost: bool = False
    """Whether responses contain their cost."""
    zero_retention: bool = False
    """Whether nothing of the tenant's requests is kept after their end, but usage records."""
    prompt_log: PromptLog | None = None
    """How the tenant's requests are logged; None if they are not."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the tenant's keys, or `*`."""
    is_operator: bool = False
    """Whether the credential may manage any tenant through the Admin API."""

    @property
    def actor(self) -> str:
        """The name that the audit log stores for changes by this principal."""
        if self.credential_id.startswith("cli:"):
            return self.credential_id
        kind = "operator:" if self.is_operator else ""
        if self.credential_id.startswith((JWT_PREFIX, "oidc:")):
            return f"{kind}{self.credential_id}"
        return f"{kind}key:{self.credential_id}"

    @property
    def limits_users(self) -> bool:
        """Whether a spend limit applies to end users."""
        return any(each.scope is SpendScope.USER for each in self.spend_limits)

    @property
    def grant(self) -> Grant:
        """Rights of the credential in its tenant."""
        return self._grant(scopes=self.scopes & TENANT_SCOPES)

    @property
    def operator_grant(self) -> Grant:
        """Rights of an operator's credential in every tenant; use only with the scope `admin`."""
        return self._grant(is_operator=True, scopes=frozenset(Scope), project_id=None)

    def _grant(self, *, is_operator: bool = False, **others: object) -> Grant:
        limits = (each.limits for each in self.limits if each.scope is LimitScope.KEY)
        bounds = {name: getattr(self, name) for name in BOUNDS}
        bounds |= {"limits": next(limits, Limits()), **others}
        return Grant(
            credential_id=self.credential_id,
            bounds=bounds,
            is_operator=is_operator,
            is_former_secret=self.is_former_secret,
        )

    def sees_use_of(self, scope: LimitScope) -> bool:
        """Whether the credential may see the usage of its key, its project or its tenant."""
        if scope is LimitScope.KEY:
            return True
        is_within = scope is LimitScope.PROJECT or self.project_id is None
        return is_within and Scope.USAGE in self.scopes

    def allows_model(self, model: str) -> bool:
        """Whether the credential may use and see the model."""
        return self.allowed_models is None or model in self.allowed_models

    def require_scope(self, *scopes: Scope) -> None:
        """Raise PermissionDeniedError unless the credential has one of the scopes."""
        if self.scopes.isdisjoint(scopes):
            wanted = "' or '".join(scopes)
            raise PermissionDeniedError(
                f"This credential lacks the scope '{wanted}' that the request needs."
            )

    def require_address(self, address: str | None) -> None:
        """Raise AddressNotAllowedError unless requests from the address are allowed."""
        if self.allowed_addresses is None:
            return
        try:
            client = ip_address(address or "")
        except ValueError:
            client = None
        # An IPv4 client of an IPv6 socket appears as ::ffff:a.b.c.d.
        client = getattr(client, "ipv4_mapped", None) or client
        if client is None or not any(client in network for network in self.allowed_addresses):
            raise AddressNotAllowedError("This credential may not be used from this address.")
