"""Routers of the console for each listener."""

from fastapi import APIRouter

from gateway.auth.sessions import Audience
from gateway.console import assets, provider_login, routing, status_page
from gateway.console.customers import (
    account,
    adapters,
    batches,
    invoices,
    keys,
    overview,
    people,
    playground,
    webhooks,
)
from gateway.console.customers import models as own_models
from gateway.console.login import login_router
from gateway.console.operators import adapters as all_adapters
from gateway.console.operators import (
    aliases,
    audit,
    live,
    models,
    money,
    plans,
    prices,
    refusals,
    tenant,
    tenants,
)
from gateway.console.operators import overview as all_overview
from gateway.console.usage import usage_router
from gateway.console.visitor import TENANT_PAGES as PATH_OF_TENANT

customers = APIRouter()
operators = APIRouter()
status = status_page.router
files = assets.router

CUSTOMER_PAGES = (overview, own_models, playground, account)
TENANT_PAGES = (keys, people, webhooks, adapters, batches, invoices)
"""Pages that customers have for their own tenant, and operators for each one."""
OPERATOR_PAGES = (
    all_overview,
    tenants,
    tenant,
    plans,
    live,
    models,
    all_adapters,
    aliases,
    money,
    prices,
    refusals,
    audit,
)

for router, audience, route_class, pages in (
    (customers, Audience.CUSTOMERS, routing.CustomerRoute, CUSTOMER_PAGES),
    (operators, Audience.OPERATORS, routing.OperatorRoute, OPERATOR_PAGES),
):
    router.include_router(login_router(audience))
    router.include_router(provider_login.provider_router(audience))
    router.include_router(usage_router(route_class))
    for each in pages:
        router.include_router(each.router)
customers.include_router(batches.own)
for each in TENANT_PAGES:
    customers.include_router(each.router, prefix="/console")
    operators.include_router(each.router, prefix=PATH_OF_TENANT)

customers.include_router(provider_login.accounts)
for router, route_class in ((customers, routing.CustomerRoute), (operators, routing.OperatorRoute)):
    rest = APIRouter(route_class=route_class, include_in_schema=False)
    rest.add_api_route("/console/{path:path}", routing.no_page)
    router.include_router(rest)
