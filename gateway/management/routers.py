"""Routers of the management API: `/v1` for tenants, `/admin` for operators.

Some resources have the same routes for both audiences (`OF_BOTH`). Where the audiences get
different things, `routes.py` has a second router, `operators`.
"""

from fastapi import APIRouter, Depends

from gateway.management.aliases import routes as aliases
from gateway.management.audit import routes as audit
from gateway.management.credits import routes as credit
from gateway.management.exports import routes as exports
from gateway.management.invoices import routes as invoices
from gateway.management.keys import routes as keys
from gateway.management.limits import routes as limits
from gateway.management.live import routes as live
from gateway.management.members import routes as members
from gateway.management.models import routes as models
from gateway.management.plans import routes as plans
from gateway.management.prices import routes as prices
from gateway.management.projects import routes as projects
from gateway.management.shared.callers import any_tenant, own_tenant
from gateway.management.tenants import routes as tenants
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

for router in (
    *(each.router for each in (tenants, plans, prices, aliases, credit, live, models)),
    *(limits.operators, usage.operators, exports.router, audit.operators),
):
    operators.include_router(router)
for resource, authorize in OF_BOTH:
    customers.include_router(resource.router, prefix="/v1", dependencies=[Depends(authorize)])
    operators.include_router(
        resource.router, prefix="/tenants/{tenant_id}", dependencies=[Depends(any_tenant)]
    )
for own in (limits, usage, audit):
    customers.include_router(own.router)
