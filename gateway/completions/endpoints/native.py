"""llama.cpp's own paths besides completions: `/models`, `/props` and `/apply-template`."""

from importlib.metadata import version
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response
from redis.exceptions import RedisError

from contract.messages import WorkerCard
from gateway.completions.admission.call import read_call, require_native_paths
from gateway.completions.admission.check import render_request
from gateway.completions.admission.model_choice import find_card, profile_of
from gateway.completions.context import ProcessContext, context_of
from gateway.completions.endpoints.models import model_list
from gateway.dialects.endpoint import CHATS
from gateway.dialects.native import default_settings
from gateway.dialects.parameters import ignored_header
from gateway.dialects.profile import Profile
from gateway.dialects.profile_choice import DIALECT_HEADER
from gateway.http.authorization import Authorizer, require_header_of
from gateway.http.exchange import exchange_of
from gateway.http.services import services_of
from gateway.records.errors import queue_unavailable
from gateway.records.principal import Principal
from gateway.records.scopes import Scope

router = APIRouter()

_BUILD: Final = f"sluice {version('sluice')}"


async def native_models(request: Request) -> Response:
    """Return the models that the caller may use."""
    context, principal, _ = await _authorize(request, model=None)
    return _respond(await model_list(context, principal))


async def props(request: Request) -> Response:
    """Return the properties of a model: of `model` in the query, else of the default model."""
    name = request.query_params.get("model")
    context, principal, profile = await _authorize(request, model=name)
    try:
        card = await find_card(context, principal, name, profile=profile)
        template = await _template(context, card)
        model = context.catalogue.known(card.model)
    except RedisError:
        raise queue_unavailable() from None
    ready = 0 if model is None else model.status.ready_workers
    special = {} if card.chat is None else card.chat.special_tokens
    return _respond(
        {
            "default_generation_settings": {
                "n_ctx": card.context_window,
                "params": default_settings(profile, context_window=card.context_window),
            },
            "total_slots": ready * card.max_sequences,
            "model_alias": card.model,
            # The path on the worker is not public.
            "model_path": card.model,
            "modalities": {"vision": bool(card.image_token), "audio": False},
            "chat_template": template,
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "build_info": f"{_BUILD}, {card.engine}",
            "is_sleeping": model is not None and model.is_asleep,
        }
    )


async def apply_template(request: Request) -> Response:
    """Return the prompt that the model's chat template renders for a chat."""
    call = await read_call(request, has_native_path=True)
    chat = (await render_request(call, CHATS)).chat.request
    return _respond({"prompt": chat.prompts[0]}, ignored_header(chat.ignored_parameters))


# Plain routes, which gateway.process.openapi.operations describes.
router.add_route("/models", native_models, methods=["GET"])
router.add_route("/props", props, methods=["GET"])
router.add_route("/apply-template", apply_template, methods=["POST"])


async def _authorize(
    request: Request, *, model: str | None
) -> tuple[ProcessContext, Principal, Profile]:
    """Return who sends a request without a body, in a dialect that has llama.cpp's own paths."""
    context = context_of(request)
    authorize = services_of(request)[Authorizer].authorize
    principal = await authorize(request, Scope.COMPLETIONS, model_decides=True)
    header = request.headers.get(DIALECT_HEADER)
    profile = await profile_of(context, principal, {"model": model}, header=header)
    exchange_of(request.scope).error_style = profile.error_style
    require_header_of(request, profile)
    require_native_paths(request, profile)
    return context, principal, profile


async def _template(context: ProcessContext, card: WorkerCard) -> str:
    """Return the source of the model's chat template; empty if it has none."""
    if card.chat is None:
        return ""
    templates = await context.chat_templates.get(card.chat.template_digest)
    return templates.choose(has_tools=False).source


def _respond(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)
