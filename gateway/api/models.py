"""`GET /v1/models` and `GET /v1/models/{id}`, from what workers announce."""

from typing import Any

from fastapi import APIRouter, Request
from redis.exceptions import RedisError
from tokenizers import Tokenizer

from contract.messages import WorkerCard
from gateway.accounts.scopes import Scope
from gateway.api.context import ProcessContext, context_of
from gateway.auth.principal import Principal
from gateway.dialects.choice import choose_profile
from gateway.dialects.support import supported_parameters
from gateway.dispatch.catalogue import ServedModel
from gateway.errors import ModelNotFoundError, ServiceUnavailableError
from gateway.prompt.infill import find_template
from gateway.prompt.tokenizers import has_tool_calls

router = APIRouter()


@router.get("/v1/models", summary="List the models you may use")
async def list_models(request: Request) -> dict[str, Any]:
    """Return every model that was announced and that the principal may use."""
    context, principal = await _authorize(request)
    visible = [
        model for model in context.catalogue.models if principal.allows_model(model.card.model)
    ]
    bodies = [await _body(context, principal, model) for model in visible]
    return {"object": "list", "data": bodies}


@router.get("/v1/models/{model_id:path}", summary="Describe one model")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """Return one model, by its id or an alias. Both may contain slashes."""
    context, principal = await _authorize(request)
    model = context.catalogue.known(model_id)
    if model is None or not principal.allows_model(model.card.model):
        raise ModelNotFoundError(model_id)
    return await _body(context, principal, model)


async def _authorize(request: Request) -> tuple[ProcessContext, Principal]:
    context = context_of(request)
    principal = await context.authenticator.authenticate(request.headers.get("authorization"))
    principal.require_scope(Scope.COMPLETIONS)
    return context, principal


async def _body(
    context: ProcessContext, principal: Principal, model: ServedModel
) -> dict[str, Any]:
    card = model.card
    tokenizer = await _tokenizer(context, card)
    profile = choose_profile(None, principal, model_dialect=card.dialect, settings=context.settings)
    return {
        "id": card.model,
        "aliases": card.aliases,
        "object": "model",
        "created": card.created,
        "owned_by": "sluice",
        "context_window": card.context_window,
        "max_model_len": card.context_window,
        "dialect": profile.name,
        "features": card.features,
        "supported_parameters": supported_parameters(
            card.features,
            has_infill=tokenizer is not None and find_template(tokenizer) is not None,
            has_tools=tokenizer is not None and has_tool_calls(tokenizer),
        ),
        "ready": model.status.ready_workers > 0,
    }


async def _tokenizer(context: ProcessContext, card: WorkerCard) -> Tokenizer | None:
    """Return the model's tokenizer; None while no worker has published it."""
    if not card.tokenizer_digest:
        return None
    try:
        return await context.tokenizers.get(card.tokenizer_digest)
    except (RedisError, ServiceUnavailableError):
        return None
