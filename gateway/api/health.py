"""`/healthz`, `/readyz` and `/metrics`, for the machines that look after this process."""

import asyncio
from typing import Final

import prometheus_client
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError

from gateway import telemetry
from gateway.api.context import context_of

PING_SECONDS: Final = 1.5
"""How long Redis may take to answer."""

router = APIRouter(include_in_schema=False)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answer while the event loop runs, whatever else is broken."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Answer 200 only when Redis answers and this process stays, so that no request is sent here in vain."""
    if request.app.state.drain.is_leaving:
        return JSONResponse({"status": "stopping"}, status_code=503)
    try:
        async with asyncio.timeout(PING_SECONDS):
            await context_of(request).redis.ping()
    except (RedisError, TimeoutError):
        return JSONResponse({"status": "redis does not answer"}, status_code=503)
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics of this process in Prometheus' text format."""
    context = context_of(request)
    telemetry.JOBS_IN_FLIGHT.set(context.dispatcher.jobs_in_flight)
    for model in context.catalogue.models:
        name, status = model.card.model, model.status
        telemetry.WAITING_JOBS.labels(name).set(status.waiting_jobs)
        telemetry.LEASED_JOBS.labels(name).set(status.leased_jobs)
        telemetry.READY_WORKERS.labels(name).set(status.ready_workers)
    return Response(
        prometheus_client.generate_latest(), media_type=prometheus_client.CONTENT_TYPE_LATEST
    )
