"""Who a request acts as."""

from dataclasses import dataclass

from contract.dialect import Dialect
from gateway.accounts.scopes import Scope
from gateway.errors import PermissionDeniedError


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

    def allows_model(self, model: str) -> bool:
        """Whether the credential may use the model, or even know of it."""
        return self.allowed_models is None or model in self.allowed_models

    def require_scope(self, scope: Scope) -> None:
        """Raise PermissionDeniedError unless the credential carries the scope."""
        if scope not in self.scopes:
            raise PermissionDeniedError(
                f"This credential lacks the scope '{scope}' that the request needs."
            )
