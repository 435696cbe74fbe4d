"""What one credential may give to another: never more than it has itself."""

from collections.abc import Collection

from gateway.accounts.records import KeyRecord, Role
from gateway.accounts.scopes import TENANT_SCOPES, Scope
from gateway.auth.principal import Principal
from gateway.auth.roles import ROLE_SCOPES
from gateway.errors import PermissionDeniedError


def require_rights_of(key: KeyRecord, principal: Principal) -> None:
    """Raise PermissionDeniedError if a tenant's own credential may not have such a key in its hands."""
    missing = key.scopes - (principal.scopes & TENANT_SCOPES)
    if missing:
        raise PermissionDeniedError(
            f"This credential cannot manage keys with the scope {_listed(missing)}: "
            "it has no such scope to give."
        )
    own = principal.allowed_models
    if own is not None and (key.allowed_models is None or not key.allowed_models <= own):
        raise PermissionDeniedError(
            "This credential is for some models only, so it manages only keys whose "
            "'allowed_models' are among its own."
        )


def grantable_roles(principal: Principal) -> frozenset[Role]:
    """Return the roles with no more rights than the credential."""
    return frozenset(role for role in Role if ROLE_SCOPES[role] <= principal.scopes)


def _listed(scopes: Collection[Scope]) -> str:
    return " or ".join(f"'{scope}'" for scope in sorted(scopes))
