"""Routers of the management API: `/v1` for tenants, `/admin` for operators.

A resource has either `routes.py` with one set of routes for both audiences, or `admin_routes.py`
for operators, or both, where the audiences get different things.
"""

from fastapi import APIRouter, Depends

from gateway.management.aliases import admin_routes as aliases
from gateway.management.audit import admin_routes as any_audit
from gateway.management.audit import routes as audit
from gateway.management.credits import admin_routes as credit
from gateway.management.exports import admin_routes as exports
from gateway.management.invoices import routes as invoices
from gateway.management.keys import routes as keys
from gateway.management.limits import admin_routes as any_limits
from gateway.management.limits import refusals
from gateway.management.limits import routes as limits
from gateway.management.live import admin_routes as live
from gateway.management.members import routes as members
from gateway.management.plans import admin_routes as plans
from gateway.management.prices import admin_routes as prices
from gateway.management.projects import routes as projects
from gateway.management.shared.callers import any_tenant, own_tenant
from gateway.management.tenants import admin_routes as tenants
from gateway.management.usage import admin_routes as any_usage
from gateway.management.usage import routes as usage
from gateway.management.webhooks import routes as webhooks
from gateway.tenancy.scopes import Scope

OF_BOTH = (
    (keys, own_tenant(Scope.KEYS)),
    (projects, own_tenant(Scope.KEYS)),
    (members, own_tenant(Scope.MEMBERS, of_tenant=True)),
    (webhooks, own_tenant(Scope.KEYS, of_tenant=True)),
    (invoices, own_tenant(Scope.USAGE, of_tenant=True)),
)
"""Resources with the same routes for both audiences, and what authorizes a tenant's credential."""

customers = APIRouter()
operators = APIRouter(prefix="/admin")

for every in (
    tenants,
    plans,
    prices,
    aliases,
    credit,
    live,
    any_limits,
    refusals,
    any_usage,
    exports,
    any_audit,
):
    operators.include_router(every.router)
for resource, authorize in OF_BOTH:
    customers.include_router(resource.router, prefix="/v1", dependencies=[Depends(authorize)])
    operators.include_router(
        resource.router, prefix="/tenants/{tenant_id}", dependencies=[Depends(any_tenant)]
    )
for own in (limits, usage, audit):
    customers.include_router(own.router)
