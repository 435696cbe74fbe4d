"""Routers of the console for each listener."""

from fastapi import APIRouter

from gateway.auth.sessions import Audience
from gateway.console import adapters, assets, audit, provider_login, routing, status_page
from gateway.console.customers import (
    account,
    batches,
    invoices,
    keys,
    people,
    playground,
    spend_limits,
    webhooks,
)
from gateway.console.customers import models as own_models
from gateway.console.customers import overview as own_overview
from gateway.console.login import login_router
from gateway.console.operators import (
    aliases,
    capacity,
    live,
    models,
    money,
    overview,
    plans,
    prices,
    refusals,
    tenant,
    tenants,
)
from gateway.console.search import search_router
from gateway.console.trying import try_router
from gateway.console.usage import usage_router
from gateway.console.visitor import TENANT_PAGES

customers = APIRouter()
operators = APIRouter()
status = status_page.router
files = assets.router

OF_CUSTOMERS = (own_overview, own_models, playground, account)
OF_TENANTS = (keys, people, spend_limits, webhooks, batches, invoices)
"""Pages that customers have for their own tenant, and operators for each one."""
OF_OPERATORS = (
    *(overview, tenants, tenant, plans, live, models, aliases, money, prices, refusals),
    capacity,
)

for router, audience, route_class, pages in (
    (customers, Audience.CUSTOMERS, routing.CustomerRoute, OF_CUSTOMERS),
    (operators, Audience.OPERATORS, routing.OperatorRoute, OF_OPERATORS),
):
    router.include_router(login_router(audience))
    router.include_router(provider_login.provider_router(audience))
    router.include_router(usage_router(route_class))
    router.include_router(search_router(route_class))
    router.include_router(try_router(route_class))
    for each in pages:
        router.include_router(each.router)
# First: `/batches/{batch_id}` of the pages of a tenant would match `/batches/new`.
for router in (batches.own, audit.customers, provider_login.accounts):
    customers.include_router(router)
for router in (*(each.router for each in OF_TENANTS), adapters.of_tenant):
    customers.include_router(router, prefix="/console")
    operators.include_router(router, prefix=TENANT_PAGES)
for router in (adapters.operators, audit.operators):
    operators.include_router(router)
for router, route_class in ((customers, routing.CustomerRoute), (operators, routing.OperatorRoute)):
    rest = APIRouter(route_class=route_class, include_in_schema=False)
    rest.add_api_route("/console/{path:path}", routing.no_page)
    router.include_router(rest)
