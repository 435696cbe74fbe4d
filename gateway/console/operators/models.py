"""Models, their queues and workers."""

import asyncio

from fastapi import APIRouter, Request, Response

from gateway.console.rendering import page
from gateway.console.routing import OperatorRoute
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console/models")
async def models(request: Request, services: AllServices) -> Response:
    """Show each model with its queue and its workers; htmx loads the page again and again."""
    known = services[Catalogue].models
    names = [each.card.model for each in known]
    found = await asyncio.gather(*map(services[Catalogue].workers, names))
    workers = dict(zip(names, found, strict=True))
    return page(request, "operators/models.html", models=known, workers=workers)
