"""`GET /v1/models` and `GET /v1/models/{id}`, from what workers announce."""

from typing import Any

from fastapi import APIRouter, Request

from gateway.accounts.scopes import Scope
from gateway.api.context import ProcessContext, context_of
from gateway.auth.principal import Principal
from gateway.dispatch.catalogue import ServedModel
from gateway.errors import ModelNotFoundError

router = APIRouter()


@router.get("/v1/models", summary="List the models you may use")
async def list_models(request: Request) -> dict[str, Any]:
    """Return every model that was announced and that the principal may use."""
    context, principal = await _authorize(request)
    visible = [
        model for model in context.catalogue.models if principal.allows_model(model.card.model)
    ]
    return {"object": "list", "data": [_body(model) for model in visible]}


@router.get("/v1/models/{model_id:path}", summary="Describe one model")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """Return one model. Model ids may contain slashes."""
    context, principal = await _authorize(request)
    for model in context.catalogue.models:
        if model.card.model == model_id and principal.allows_model(model_id):
            return _body(model)
    raise ModelNotFoundError(model_id)


async def _authorize(request: Request) -> tuple[ProcessContext, Principal]:
    context = context_of(request)
    principal = await context.authenticator.authenticate(request.headers.get("authorization"))
    principal.require_scope(Scope.COMPLETIONS)
    return context, principal


def _body(model: ServedModel) -> dict[str, Any]:
    card = model.card
    return {
        "id": card.model,
        "object": "model",
        "created": card.created,
        "owned_by": "sluice",
        "context_window": card.context_window,
        "max_model_len": card.context_window,
        "supported_parameters": card.supported_parameters,
        "ready": model.status.ready_workers > 0,
    }
