"""Admin API routes under `/admin`: the customer routes, for operators and for any tenant."""

from fastapi import APIRouter

from gateway.api.admin import (
    audit,
    keys,
    limits,
    members,
    plans,
    prices,
    projects,
    tenants,
    usage,
    webhooks,
)
from gateway.api.admin.credits import router as credits_router

router = APIRouter(prefix="/admin")
router.include_router(tenants.router)
router.include_router(projects.router)
router.include_router(members.router)
router.include_router(keys.router)
router.include_router(plans.router)
router.include_router(prices.router)
router.include_router(credits_router)
router.include_router(limits.router)
router.include_router(webhooks.router)
router.include_router(usage.router)
router.include_router(audit.router)
