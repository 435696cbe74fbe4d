"""llama.cpp's own paths besides completions: `/models`, `/props` and `/apply-template`."""

from importlib.metadata import version
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request, Response
from redis.exceptions import RedisError

from contract.messages import WorkerCard
from gateway.completions.admission.call import RequestReader
from gateway.completions.admission.check import RequestChecker
from gateway.completions.admission.model_choice import Models
from gateway.completions.endpoints.models import ModelList
from gateway.completions.prompt.chat_templates import ChatTemplates
from gateway.dialects.endpoint import CHATS
from gateway.dialects.native import default_settings
from gateway.dialects.parameters import ignored_header
from gateway.http.query import takes_query
from gateway.http.services import services_of
from gateway.models.catalogue import Catalogue
from gateway.records.errors import queue_unavailable

router = APIRouter()

_BUILD: Final = f"sluice {version('sluice')}"


async def native_models(request: Request) -> Response:
    """Return the models that the caller may use."""
    services = services_of(request)
    call = await services[RequestReader].read_query(request, {}, has_native_path=True)
    return _respond(await services[ModelList].list(call.principal))


@takes_query("model")
async def props(request: Request) -> Response:
    """Return the properties of a model: of `model` in the query, else of the default model."""
    name, services = request.query_params.get("model"), services_of(request)
    reader = services[RequestReader]
    call = await reader.read_query(request, {"model": name}, has_native_path=True)
    try:
        card = (await services[Models].find(call.choice)).card
        template = await _template(services[ChatTemplates], card)
        model = services[Catalogue].known(card.model)
    except RedisError:
        raise queue_unavailable() from None
    ready = 0 if model is None else model.status.ready_workers
    special = {} if card.chat is None else card.chat.special_tokens
    return _respond(
        {
            "default_generation_settings": {
                "n_ctx": card.context_window,
                "params": default_settings(call.profile, context_window=card.context_window),
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
    services = services_of(request)
    call = await services[RequestReader].read(request, has_native_path=True)
    chat = (await services[RequestChecker].render(call, CHATS)).chat.request
    return _respond({"prompt": chat.prompts[0]}, ignored_header(chat.ignored_parameters))


# Plain routes, which gateway.process.openapi.operations describes.
router.add_route("/models", native_models, methods=["GET"])
router.add_route("/props", props, methods=["GET"])
router.add_route("/apply-template", apply_template, methods=["POST"])


async def _template(chat_templates: ChatTemplates, card: WorkerCard) -> str:
    """Return the source of the model's chat template; empty if it has none."""
    if card.chat is None:
        return ""
    templates = await chat_templates.get(card.chat.template_digest)
    return templates.choose(has_tools=False).source


def _respond(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)
