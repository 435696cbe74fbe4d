"""Admin API routes under `/admin`: the customer routes, for operators and for any tenant."""

from fastapi import APIRouter

from gateway.management.audit import admin_routes as audit
from gateway.management.credits import admin_routes as credit
from gateway.management.keys import admin_routes as keys
from gateway.management.limits import admin_routes as limits
from gateway.management.members import admin_routes as members
from gateway.management.plans import admin_routes as plans
from gateway.management.prices import admin_routes as prices
from gateway.management.projects import admin_routes as projects
from gateway.management.tenants import admin_routes as tenants
from gateway.management.usage import admin_routes as usage
from gateway.management.webhooks import admin_routes as webhooks

RESOURCES = (
    tenants,
    projects,
    members,
    keys,
    plans,
    prices,
    credit,
    limits,
    webhooks,
    usage,
    audit,
)

router = APIRouter(prefix="/admin")
for resource in RESOURCES:
    router.include_router(resource.router)
