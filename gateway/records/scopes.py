"""Scopes: the rights that a credential carries, and those of members by their roles."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Scope(StrEnum):
    """A right that a credential carries."""

    COMPLETIONS = "completions"  # Use the generation API, and see the models.
    USAGE = "usage"  # See the usage, limits and credits of the whole tenant.
    KEYS = "keys"  # Manage the tenant's keys, projects and webhooks.
    MEMBERS = "members"  # Manage the tenant's members.
    ADMIN_READ = "admin:read"  # See everything of every tenant.
    ADMIN = "admin"  # Manage everything of every tenant.


DEFAULT_SCOPES = frozenset({Scope.COMPLETIONS})

TENANT_SCOPES = frozenset({Scope.COMPLETIONS, Scope.USAGE, Scope.KEYS, Scope.MEMBERS})
"""Scopes that a tenant can give to its own keys, and that its members can have."""

OPERATOR_SCOPES = frozenset({Scope.ADMIN, Scope.ADMIN_READ})
"""Scopes that only the operator of the deployment gives.

The operator gives them to a key, or through a token claim that the settings map to them.
"""


class Role(StrEnum):
    """What a member may do in a tenant; see `ROLE_SCOPES`."""

    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    BILLING = "billing"
    VIEWER = "viewer"

    @classmethod
    def most_of(cls, roles: "Iterable[Role]") -> "Role | None":
        """Return the role with the most rights; None without any."""
        return min(roles, key=list(cls).index, default=None)


ROLE_SCOPES: Final[Mapping[Role, frozenset[Scope]]] = MappingProxyType(
    {
        Role.OWNER: TENANT_SCOPES,
        Role.ADMIN: TENANT_SCOPES - {Scope.MEMBERS},
        Role.DEVELOPER: frozenset({Scope.COMPLETIONS}),
        Role.BILLING: frozenset({Scope.USAGE}),
        Role.VIEWER: frozenset({Scope.USAGE}),
    }
)
