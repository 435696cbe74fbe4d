"""The gateway as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from gateway.api import (
    admin,
    audit,
    generation,
    health,
    kept_answers,
    keys,
    limits,
    members,
    models,
    projects,
    tokenize,
    usage,
    webhooks,
)
from gateway.api.context import open_context
from gateway.api.documentation import install_documentation
from gateway.api.draining import Drain, DrainMiddleware
from gateway.api.error_handlers import install_error_handlers
from gateway.api.http_metrics import HttpMetricsMiddleware
from gateway.api.request_id import RequestIdMiddleware
from gateway.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """Return the application. Nothing is opened before its lifespan begins."""
    drain = Drain()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_context(settings, on_failure=drain.fail) as context:
            app.state.context = context
            yield

    # The page /docs loads nothing from other servers.
    app = FastAPIOffline(
        title="Sluice",
        version=version("sluice"),
        description="A completions gateway with batched GPU workers.",
        lifespan=lifespan,
        redoc_url=None,
        openapi_tags=[{"name": "Completions"}, {"name": "Chat"}, {"name": "Models"}],
        # Bodies are shown as lists of parameters with their meaning, and not as examples.
        swagger_ui_parameters={"defaultModelRendering": "model", "defaultModelExpandDepth": 2},
    )
    install_error_handlers(app)
    install_documentation(app)
    app.state.drain = drain
    app.add_middleware(DrainMiddleware, drain=drain)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(HttpMetricsMiddleware)
    app.include_router(generation.router)
    app.include_router(kept_answers.router)
    app.include_router(tokenize.router)
    app.include_router(models.router)
    app.include_router(keys.router)
    app.include_router(projects.router)
    app.include_router(members.router)
    app.include_router(limits.router)
    app.include_router(webhooks.router)
    app.include_router(usage.router)
    app.include_router(audit.router)
    app.include_router(admin.router)
    app.include_router(health.router)
    return app
