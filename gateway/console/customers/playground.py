"""The playground: try a completion or a chat with the rights of the session's key."""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.accounts.shared import MAX_TEXT_CHARACTERS
from gateway.completions.endpoints.generation import Completions
from gateway.console.customers.account import base_url
from gateway.console.rendering import page
from gateway.console.routing import CustomerRoute, Visitor, needs
from gateway.dialects.endpoint import CHATS, COMPLETIONS
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue
from gateway.records.scopes import Scope

NUMBERS: Final = (
    ("max_tokens", "Maximum tokens", "200", "1"),
    ("temperature", "Temperature", "", "any"),
    ("top_p", "Top p", "", "any"),
    ("top_k", "Top k", "", "1"),
    ("min_p", "Min p", "", "any"),
    ("seed", "Seed", "", "1"),
    ("presence_penalty", "Presence penalty", "", "any"),
    ("frequency_penalty", "Frequency penalty", "", "any"),
    ("repetition_penalty", "Repetition penalty", "", "any"),
)
"""Parameters with fields of their own: name, label, first value and step."""

router = APIRouter(route_class=CustomerRoute, include_in_schema=False)

Generates = Annotated[Visitor, Depends(needs(Scope.COMPLETIONS))]


@router.get("/console/playground")
async def playground(
    request: Request,
    services: AllServices,
    visitor: Generates,
    model: Annotated[str, Query(max_length=MAX_TEXT_CHARACTERS)] = "",
) -> Response:
    """Show the form. One script sends it and shows the stream."""
    models = sorted(filter(visitor.principal.allows_model, services[Catalogue].names))
    if model and model not in models:
        models.append(model)  # An alias or an adapter.
    return page(
        request,
        "playground.html",
        model_options=[(name, name) for name in models],
        model=model or visitor.principal.default_model,
        numbers=NUMBERS,
        base_url=base_url(request),
    )


@router.post("/console/playground/completions")
async def complete(request: Request, services: AllServices, visitor: Generates) -> Response:
    """Run a request of `POST /v1/completions`."""
    completions = services[Completions]
    return await completions.create(request, COMPLETIONS, authorized=visitor.principal)


@router.post("/console/playground/completions:estimate")
async def estimate(request: Request, services: AllServices, visitor: Generates) -> Response:
    """Estimate such a request."""
    completions = services[Completions]
    return await completions.estimate(request, COMPLETIONS, authorized=visitor.principal)


@router.post("/console/playground/chat/completions")
async def chat(request: Request, services: AllServices, visitor: Generates) -> Response:
    """Run a request of `POST /v1/chat/completions`."""
    completions = services[Completions]
    return await completions.create(request, CHATS, authorized=visitor.principal)


@router.post("/console/playground/chat/completions:estimate")
async def estimate_chat(request: Request, services: AllServices, visitor: Generates) -> Response:
    """Estimate such a request."""
    completions = services[Completions]
    return await completions.estimate(request, CHATS, authorized=visitor.principal)
