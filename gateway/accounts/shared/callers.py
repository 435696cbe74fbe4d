"""Callers of routes that tenants have under `/v1` and operators under `/admin/tenants/{tenant_id}`.

The router of the audience authorizes the caller and sets the tenant (`gateway.process.management`).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from gateway.accounts.shared.parameters import TenantId
from gateway.http.authorization import operates, requires
from gateway.records.grants import Grant
from gateway.records.principal import Principal
from gateway.records.scopes import Scope


@dataclass(frozen=True, slots=True)
class Caller:
    """A principal, and the tenant that its request concerns."""

    principal: Principal
    tenant_id: str

    @property
    def actor(self) -> str:
        """The name that the audit log stores."""
        return self.principal.actor

    @property
    def grant(self) -> Grant | None:
        """Rights of a tenant's credential; None for operators."""
        return None if self.principal.is_operator else self.principal.grant

    @property
    def by(self) -> dict[str, Any]:
        """Who makes a change (`gateway.accounts.changes.By`)."""
        return {"actor": self.actor, "grantor": self.grant}

    @property
    def key_by(self) -> dict[str, Any]:
        """Who creates or changes a key. For operators too, there is an upper bound of rights."""
        principal = self.principal
        grant = principal.operator_grant if principal.is_operator else principal.grant
        return {"actor": self.actor, "grantor": grant}


def own_tenant(*scopes: Scope, of_tenant: bool = False) -> Callable[[Request], Awaitable[None]]:
    """Return a dependency that authorizes a caller for its own tenant, as `requires` does."""
    authorized = requires(*scopes, of_tenant=of_tenant)

    async def dependency(request: Request) -> None:
        principal = await authorized(request)
        request.state.management_caller = Caller(principal, principal.tenant_id)

    return dependency


async def any_tenant(request: Request, tenant_id: TenantId) -> None:
    """Authorize an operator for the tenant in the path; only `admin` may change something."""
    scopes = (Scope.ADMIN, Scope.ADMIN_READ) if request.method == "GET" else (Scope.ADMIN,)
    request.state.management_caller = Caller(await operates(*scopes)(request), tenant_id)


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.management_caller
    return caller


CallerOfTenant = Annotated[Caller, Depends(_caller)]
