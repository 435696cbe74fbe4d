"""Who a request acts as."""

from dataclasses import dataclass
from ipaddress import ip_address

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.accounts.limits import SubjectLimits
from gateway.accounts.records import Network
from gateway.accounts.scopes import Scope
from gateway.errors import AddressNotAllowedError, PermissionDeniedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A tenant, through one of its credentials."""

    tenant_id: str
    tenant_weight: float
    credential_id: str
    """Id of the API key, or `jwt:` and the token's subject."""
    scopes: frozenset[Scope]
    allowed_models: frozenset[str] | None
    """None stands for all models."""
    dialect: Dialect | None = None
    """The credential's dialect, else the tenant's."""
    is_strict: bool = False
    """Whether parameters that would have no effect are refused."""
    default_model: str | None = None
    """The tenant's model for requests that name none."""
    project_id: str | None = None
    allowed_addresses: tuple[Network, ...] | None = None
    """Where requests may come from; None stands for anywhere."""
    limits: tuple[SubjectLimits, ...] = ()
    """Of key, project and tenant, in this order; a JWT has no key."""
    is_prepaid: bool = False
    service_tier: ServiceTier = ServiceTier.DEFAULT
    """The tier of requests that name none."""
    shows_cost: bool = False
    """Whether answers say what they cost."""

    @property
    def actor(self) -> str:
        """The name under which changes are audited."""
        if self.credential_id.startswith("jwt:"):
            return self.credential_id
        return f"key:{self.credential_id}"

    def allows_model(self, model: str) -> bool:
        """Whether the credential may use the model, or even know of it."""
        return self.allowed_models is None or model in self.allowed_models

    def require_scope(self, *scopes: Scope) -> None:
        """Raise PermissionDeniedError unless the credential carries one of the scopes."""
        if self.scopes.isdisjoint(scopes):
            wanted = "' or '".join(scopes)
            raise PermissionDeniedError(
                f"This credential lacks the scope '{wanted}' that the request needs."
            )

    def require_address(self, address: str | None) -> None:
        """Raise AddressNotAllowedError unless requests may come from the address."""
        if self.allowed_addresses is None:
            return
        try:
            client = ip_address(address or "")
        except ValueError:
            client = None
        # An IPv4 client of an IPv6 socket shows as ::ffff:a.b.c.d.
        client = getattr(client, "ipv4_mapped", None) or client
        if client is None or not any(client in network for network in self.allowed_addresses):
            raise AddressNotAllowedError("This credential may not be used from this address.")
