"""Routers of the management API: `/v1` for tenants, `/admin` for operators.

Some resources have the same routes for both audiences (`OF_BOTH`). Where the audiences get
different things, `routes.py` has a second router, `operators`.
"""

from fastapi import APIRouter, Depends

from gateway.accounts.aliases import routes as aliases
from gateway.accounts.audit import routes as audit
from gateway.accounts.keys import routes as keys
from gateway.accounts.limits import routes as limits
from gateway.accounts.members import routes as members
from gateway.accounts.models import routes as models
from gateway.accounts.plans import routes as plans
from gateway.accounts.projects import routes as projects
from gateway.accounts.shared.callers import any_tenant, own_tenant
from gateway.accounts.tenants import routes as tenants
from gateway.accounts.webhooks import routes as webhooks
from gateway.billing.credits import routes as credit
from gateway.billing.exports import routes as exports
from gateway.billing.invoices import routes as invoices
from gateway.billing.live import routes as live
from gateway.billing.prices import routes as prices
from gateway.billing.usage import routes as usage
from gateway.records.scopes import Scope

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
