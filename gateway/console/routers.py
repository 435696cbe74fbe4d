"""Routers of the console for each listener."""

from fastapi import APIRouter

from gateway.console import assets
from gateway.console.customers import (
    account,
    invoices,
    keys,
    overview,
    people,
    playground,
    usage,
    webhooks,
)
from gateway.console.login import login_router
from gateway.console.operators import audit, live, models, tenants
from gateway.console.operators import overview as all_overview
from gateway.console.operators import usage as all_usage
from gateway.console.sessions import Audience

customers = APIRouter()
operators = APIRouter()

for router, audience, pages in (
    (
        customers,
        Audience.CUSTOMERS,
        (overview, usage, invoices, playground, keys, people, webhooks, account),
    ),
    (operators, Audience.OPERATORS, (all_overview, tenants, live, models, all_usage, audit)),
):
    router.include_router(assets.router)
    router.include_router(login_router(audience))
    for each in pages:
        router.include_router(each.router)
