"""The first page."""

from fastapi import APIRouter, Request, Response

from gateway.console.rendering import page
from gateway.console.routing import OperatorRoute

router = APIRouter(route_class=OperatorRoute, include_in_schema=False)


@router.get("/console")
async def overview(request: Request) -> Response:
    """Show the first page."""
    return page(request, "operators/overview.html")
