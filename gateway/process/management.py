"""Routers of the management API: `/v1` for tenants, `/admin` for operators.

A module with `authorize_tenant` has the same routes for both audiences: operators have them for
each tenant. Where the audiences get different things, `routes.py` has a second router, `operators`.
"""

from fastapi import APIRouter, Depends

from gateway.accounts import aliases, limits, members, models
from gateway.accounts.audit import routes as audit
from gateway.accounts.keys import routes as keys
from gateway.accounts.plans import routes as plans
from gateway.accounts.projects import routes as projects
from gateway.accounts.shared import any_tenant
from gateway.accounts.tenants import routes as tenants
from gateway.accounts.webhooks import routes as webhooks
from gateway.billing import invoices, live, prices
from gateway.billing.credits import routes as credit
from gateway.billing.exports import routes as exports
from gateway.billing.usage import routes as usage

customers = APIRouter()
operators = APIRouter(prefix="/admin")

for router in (
    *(each.router for each in (tenants, plans, prices, aliases, credit, live, models)),
    *(limits.operators, usage.operators, exports.router, audit.operators),
):
    operators.include_router(router)
for resource in (keys, projects, members, webhooks, invoices):
    of_tenant = [Depends(resource.authorize_tenant)]
    customers.include_router(resource.router, prefix="/v1", dependencies=of_tenant)
    operators.include_router(
        resource.router, prefix="/tenants/{tenant_id}", dependencies=[Depends(any_tenant)]
    )
for own in (limits, usage, audit):
    customers.include_router(own.router)
