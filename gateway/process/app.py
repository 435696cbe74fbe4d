"""The gateway's two ASGI applications: one for customers, one for operators."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.datastructures import State
from starlette.routing import Route
from starlette.types import ASGIApp
from typing_extensions import override

from gateway.accounts import aliases, limits, members, prompt_log, spend_alerts, spend_limits
from gateway.accounts import models as served_models
from gateway.accounts.audit import routes as audit
from gateway.accounts.keys import routes as keys
from gateway.accounts.plans import routes as plans
from gateway.accounts.projects import routes as projects
from gateway.accounts.tenants import routes as tenants
from gateway.accounts.webhooks import routes as webhooks
from gateway.adapters import routes as adapters
from gateway.batches import messages as message_batches
from gateway.batches import routes as batches
from gateway.batches.chunk_runner import running_batches
from gateway.batches.files import routes as files
from gateway.billing import invoices, live, prices
from gateway.billing.credits import routes as credit
from gateway.billing.exports import routes as exports
from gateway.billing.status import routes as status
from gateway.billing.usage import organization
from gateway.billing.usage import routes as usage
from gateway.completions.endpoints import generation, models, native, stored, tokenize
from gateway.console import routers as console
from gateway.http import front_page
from gateway.http.cors import CorsMiddleware
from gateway.http.draining import Draining, DrainMiddleware
from gateway.http.error_handlers import install_error_handlers
from gateway.http.front import FrontMiddleware
from gateway.http.front_page import FixedPages
from gateway.http.public_pages import REFERENCE_HEADERS
from gateway.platform import tracing
from gateway.platform.settings import Settings
from gateway.process import health
from gateway.process.openapi.document import install_documentation, parameter_groups
from gateway.process.openapi.operations import GENERATION_TAGS
from gateway.process.openapi.reference import Reference
from gateway.process.openapi.schemas import RESPONSE_HEADERS
from gateway.process.services import open_services

_OPENAPI: Final = "/openapi.json"
RESOURCES: Final = (keys, projects, members, spend_limits, webhooks, invoices, prompt_log)
"""Resources of tenants that are in both applications."""
CUSTOMER_ROUTERS = (
    generation.router,
    files.router.customers,
    batches.router.customers,
    message_batches.customers,
    stored.router,  # After `/v1/messages/batches`, which is no id of a response.
    tokenize.router,
    native.router,
    models.router,
    adapters.router.customers,
    *(each.router.customers for each in RESOURCES),
    *(each.router for each in (limits, usage, organization, audit)),
    spend_limits.organization,
    spend_alerts.router,
    front_page.customer_router,
    health.customer_router,
    health.router,
)
OPERATOR_ROUTERS = (
    *(each.router for each in (tenants, plans, prices, aliases, credit, live, served_models)),
    *(limits.operators, usage.operators, exports.router, audit.operators),
    *(each.router.operators for each in (*RESOURCES, adapters, files, batches)),
    front_page.operator_router,
    health.router,
    health.metrics_router,
)


def create_app(settings: Settings) -> FastAPI:
    """Return the customers' application. It opens no connections until its lifespan starts."""
    drain = Draining()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tracing.start(settings)
        try:
            async with (
                open_services(settings, on_failure=drain.fail) as services,
                running_batches(services, drain),
            ):
                app.state.services = services
                yield
        finally:
            tracing.stop()

    # Last: the router tries routes in order, and the API's come first.
    own: list[APIRouter] = []
    if settings.status_page:
        own += [status.router, console.status]
    if settings.status_page or settings.console:
        own.append(console.files)
    if settings.console:
        own.append(console.customers)
    app = _application("Sluice", (*CUSTOMER_ROUTERS, *own), generates=True, lifespan=lifespan)
    app.state.drain = drain

    def wrap(inner: ASGIApp) -> ASGIApp:
        drained = DrainMiddleware(inner, drain)
        return CorsMiddleware(drained, origins=settings.cors_origins, exposed=RESPONSE_HEADERS)

    app.middleware_stack = FrontMiddleware(
        app.build_middleware_stack(),
        application=app,
        direct=generation.router.routes,
        wrap=wrap,
        traces=settings.traces,
        drain=drain,
    )
    return app


def create_operator_app(settings: Settings, customers: FastAPI) -> FastAPI:
    """Return the operators' application, which shares the resources of the customers' application.

    It does not drain: it serves until every customer request has ended.
    """
    own = (console.files, console.operators) if settings.console else ()
    app = _application("Sluice for operators", (*OPERATOR_ROUTERS, *own), generates=False)
    app.state = customers.state
    app.middleware_stack = FrontMiddleware(
        app.build_middleware_stack(),
        application=app,
        wrap=lambda inner: inner,
        traces=settings.traces,
        drain=Draining(),
    )
    return app


def _application(
    title: str,
    routers: tuple[APIRouter, ...],
    *,
    generates: bool,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    app = FastAPI(
        docs_url=None,
        title=title,
        openapi_url=_OPENAPI,
        version=version("sluice"),
        description="A multi-tenant completions gateway with batched GPU workers.",
        lifespan=lifespan,
        redoc_url=None,
        # A redirect would contain the host name from the client's Host header.
        redirect_slashes=False,
        strict_content_type=False,
        openapi_tags=[{"name": tag} for tag in GENERATION_TAGS] if generates else None,
    )
    app.state = _PlainState()
    install_error_handlers(app)
    for router in routers:
        app.include_router(router)
    install_documentation(app, generates=generates)
    document = FixedPages(lambda: {_OPENAPI: msgspec.json.encode(app.openapi())})
    docs = FixedPages(
        lambda: Reference(app.openapi(), parameter_groups()).pages(), headers=REFERENCE_HEADERS
    )
    # FastAPI's own route encodes the document for each request.
    app.router.routes[:] = [
        Route(_OPENAPI, document.respond, include_in_schema=False)
        if getattr(route, "path", "") == _OPENAPI
        else route
        for route in app.routes
    ]
    for path in ("/docs", "/docs/{page:path}"):
        app.add_route(path, docs.respond, include_in_schema=False)
    return app


class _PlainState(State):
    """A state that keeps its attributes on the object, where Python finds them without its code.

    Each request reads the services several times.
    """

    @override
    def __setattr__(self, key: Any, value: Any) -> None:
        super().__setattr__(key, value)
        object.__setattr__(self, key, value)
