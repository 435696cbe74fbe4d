"""Scopes that members of a tenant have by their roles."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gateway.records.records import Role
from gateway.records.scopes import TENANT_SCOPES, Scope

ROLE_SCOPES: Final[Mapping[Role, frozenset[Scope]]] = MappingProxyType(
    {
        Role.OWNER: TENANT_SCOPES,
        Role.ADMIN: TENANT_SCOPES - {Scope.MEMBERS},
        Role.DEVELOPER: frozenset({Scope.COMPLETIONS}),
        Role.BILLING: frozenset({Scope.USAGE}),
        Role.VIEWER: frozenset({Scope.USAGE}),
    }
)
