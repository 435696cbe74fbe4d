"""Health checks and metrics.

Both listeners: `/healthz` and `/readyz`. Customers only: `/health`, `/v1/health`, `/ping`, `/load`
and `/version`, under the names that clients and load balancers of other servers expect. Operators
only: `/metrics`.
"""

import asyncio
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from common.redis_cluster import slot_map_of
from gateway.completions.queue.dispatcher import Dispatcher
from gateway.http.services import Services, services_of
from gateway.limits.reservations import Reservations
from gateway.models.catalogue import Catalogue
from gateway.platform import telemetry
from gateway.platform.redis_client import observe_servers

PING_SECONDS: Final = 1.5
"""Timeout for Redis to respond."""

router = APIRouter(include_in_schema=False)
customer_router = APIRouter()
metrics_router = APIRouter(include_in_schema=False)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Respond while the event loop runs, even if everything else fails."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """Respond with 200 only if Redis accepts writes and this process is not draining.

    Load balancers send requests only then.
    """
    return await _readiness(request, ready="ready")


async def health(request: Request) -> Response:
    """Respond with 200 only if the gateway is ready, by the same rule as `/readyz`."""
    return await _readiness(request, ready="ok")


async def version(request: Request) -> Response:
    """Return the version of the gateway."""
    return JSONResponse({"version": request.app.version})


async def load(request: Request) -> Response:
    """Return the number of jobs that this process waits for, under vLLM's name."""
    return JSONResponse({"server_load": services_of(request)[Dispatcher].jobs_in_flight})


# Plain routes, which also accept HEAD; gateway.process.openapi.operations describes them.
customer_router.add_route("/health", health, methods=["GET"])
customer_router.add_route("/v1/health", health, methods=["GET"])
customer_router.add_route("/load", load, methods=["GET"])
customer_router.add_route("/ping", health, methods=["GET", "POST"])
customer_router.add_route("/version", version, methods=["GET"])


@metrics_router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics of this process.

    The format is Prometheus text, or OpenMetrics if the request accepts it.
    """
    await _observe(services_of(request))
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    page = await asyncio.to_thread(encode, REGISTRY)  # Many models have thousands of series.
    return Response(page, headers={"content-type": content_type})


async def _observe(services: Services) -> None:
    """Set the gauges whose values are read on request."""
    await observe_servers(services[Redis], timeout_seconds=PING_SECONDS)
    telemetry.JOBS_IN_FLIGHT.set(services[Dispatcher].jobs_in_flight)
    telemetry.RESERVED_REQUESTS.set(services[Reservations].open_requests)
    # Remove the values of models that no longer exist.
    for gauge in telemetry.OF_MODELS:
        gauge.clear()
    for model in services[Catalogue].models:
        name, status = model.card.model, model.status
        telemetry.model_known(name)
        telemetry.WAITING_JOBS.labels(name).set(status.waiting_jobs)
        telemetry.WAITING_BATCH_JOBS.labels(name).set(status.waiting_batch_jobs)
        telemetry.LEASED_JOBS.labels(name).set(status.leased_jobs)
        telemetry.READY_WORKERS.labels(name).set(status.ready_workers)
        telemetry.OLDEST_WAIT.labels(name).set(status.oldest_wait_seconds)
        telemetry.WAITING_TENANTS.labels(name).set(status.waiting_tenants)


async def _readiness(request: Request, *, ready: str) -> Response:
    if request.app.state.drain.is_draining:
        return JSONResponse({"status": "stopping"}, status_code=503)
    services = services_of(request)
    redis, presence = services[Redis], services[Dispatcher].presence
    try:
        async with asyncio.timeout(PING_SECONDS):
            # A full Redis or a replica still responds to pings.
            await presence.announce(redis)
            if slot_map_of(redis) is None:
                # In a cluster, all gateways would depend on one master.
                await presence.enlist(redis)
    except ResponseError:
        return JSONResponse({"status": "redis rejects writes"}, status_code=503)
    except (RedisError, TimeoutError):
        return JSONResponse({"status": "redis does not respond"}, status_code=503)
    return JSONResponse({"status": ready})
