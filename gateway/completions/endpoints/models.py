"""Models that workers announce: `GET /v1/models` and `GET /v1/models/{id}`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from tokenizers import Tokenizer

from contract.grammar import HERMES_PARSERS
from contract.messages import Feature, PoolingSupport, PoolingTask, WorkerCard
from contract.tier import REQUEST_TIERS, ServiceTier
from gateway.completions.admission.model_choice import Models
from gateway.completions.prompt.infill import find_template
from gateway.completions.prompt.tokenizers import TokenizerStore
from gateway.completions.structure.tools import has_tool_calls
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.embeddings import (
    ClassificationRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from gateway.dialects.endpoint import BATCH_ENDPOINTS, served_endpoints
from gateway.dialects.parameters import (
    REJECTED,
    REJECTED_BY_CHATS,
    REJECTED_BY_POOLING,
    supported_chat_parameters,
    supported_parameters,
)
from gateway.dialects.profile_choice import choose_profile
from gateway.http.authorization import Authorizer
from gateway.http.exchange import is_anthropic
from gateway.http.services import services_of
from gateway.models.access import allows_adapter, find_adapter, is_runnable
from gateway.models.alias_and_adapter_caches import AdapterBook, AliasBook
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.models.price_book import PriceBook
from gateway.platform.settings import Settings
from gateway.records.adapters import Adapter
from gateway.records.aliases import Alias
from gateway.records.errors import (
    ModelNotFoundError,
    NotFoundError,
    NoWorkerError,
    ServiceUnavailableError,
    StoreUnavailableError,
    invalid,
    must,
)
from gateway.records.principal import Principal
from gateway.records.records import PRICE_MICROS
from gateway.records.scopes import Scope
from gateway.records.times import utc_now

router = APIRouter(tags=["Models"])

_UNSERVED: Final[Mapping[str, Any]] = {"ready": False, "state": NoWorkerError.code}
"""What differs for an adapter that the workers of its base model cannot run."""

_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "stop", "seed", "max_tokens", "logit_bias"),
)
_FEATURES: Final[Mapping[str, tuple[str, ...]]] = {
    Feature.TOOLS: ("tools",),
    Feature.STRUCTURE: ("json_mode", "structured_outputs"),
    Feature.REASONING: ("reasoning",),
}
_OUTPUTS: Final = {"generate": "text", "embed": "embeddings", "classify": "rerank"}
_PAGE: Final = 20
_MOST_OF_PAGE: Final = 1000
"""Default and largest `limit` of a page."""
_OfPages = Annotated[str | None, Query(description="Of pages, as in Anthropic's form.")]
Lifecycle = Literal["active", "deprecated", "retired"]
"""Anthropic's stages. An alias that ends is deprecated, and then no longer listed."""
_CODEX_EFFORTS: Final = ("low", "medium", "high")
_CODEX_INSTRUCTIONS: Final = (
    "You are a coding agent that works in the user's terminal. Read the files that matter before "
    "you change them, change them with the tools that you have, and check the result by running "
    "it. Work until the task is done, then say briefly what you changed."
)
_PRICE_DIGITS: Final = 12
"""Prices are in micro-dollars per million tokens, and here in dollars per token."""


@dataclass(eq=False)
class ModelList:
    """The models, aliases and adapters that a principal may use, as clients see them."""

    _settings: Settings
    _models: Models
    _catalogue: Catalogue
    _aliases: AliasBook
    _adapters: AdapterBook
    _tokenizers: TokenizerStore
    _prices: PriceBook

    async def list(self, principal: Principal) -> dict[str, Any]:
        """Return the bodies of the models, aliases and adapters that a principal may use."""
        catalogue, now = self._catalogue, utc_now()
        visible = [
            model
            for model in catalogue.models
            if principal.allows_model(model.card.model)
            and self._aliases.find(model.card.model) is None
        ]
        bodies = {model.card.model: await self._body(principal, model) for model in visible}
        listed = [*bodies.values()]
        for alias in self._aliases.aliases:
            if not alias.is_allowed(principal.allows_model) or alias.is_over(now):
                continue
            model = catalogue.known(self._models.model_of(principal, alias))
            if model is not None:
                listed.append(await self._body_of_alias(principal, alias, model))
        for adapter in self._adapters.visible_to(principal.tenant_id):
            base = catalogue.known(adapter.base_model)
            if base is None or not allows_adapter(principal, adapter):
                continue
            if (name := base.card.model) not in bodies:
                bodies[name] = await self._body(principal, base)
            listed.append(self._body_of_adapter(adapter, base, bodies[name]))
        return {"object": "list", "data": listed}

    async def get(self, principal: Principal, model_id: str) -> dict[str, Any]:
        """Return one model by its id or an alias. Both may contain slashes."""
        alias = self._aliases.find(model_id)
        if alias is not None and alias.is_allowed(principal.allows_model):
            alias.check_current(utc_now())
            model = self._catalogue.known(self._models.model_of(principal, alias))
            if model is None:
                raise ModelNotFoundError(model_id)
            return await self._body_of_alias(principal, alias, model)
        model = self._catalogue.known(model_id)
        if alias is None and model is None:
            adapter = find_adapter(self._catalogue, self._adapters, principal, model_id)
            base = None if adapter is None else self._catalogue.known(adapter.base_model)
            if adapter is not None and base is not None:
                body = await self._body(principal, base)
                return self._body_of_adapter(adapter, base, body)
        if alias is not None or model is None or not principal.allows_model(model.card.model):
            raise ModelNotFoundError(model_id)
        return await self._body(principal, model)

    async def _body(self, principal: Principal, model: ServedModel) -> dict[str, Any]:
        card = model.card
        tokenizer = await self._tokenizer(card)
        profile = choose_profile(
            None, principal, model_dialect=card.dialect, settings=self._settings
        )
        return {
            "id": card.model,
            "aliases": card.aliases,
            "object": "model",
            "created": card.created,
            "owned_by": "sluice",
            "root": card.model,
            "parent": None,
            "context_window": card.context_window,
            "max_model_len": card.context_window,
            "meta": {
                "n_vocab": card.vocabulary_size,
                "n_ctx": card.context_window,
                "n_ctx_train": card.context_window,
            },
            "dialect": profile.name,
            "features": card.features,
            "tool_parser": card.chat.tool_parser if card.chat else "",
            "endpoints": [*served_endpoints(card).values()],
            **(_parameters(card, tokenizer) if card.pooling is None else _pooling(card.pooling)),
            "service_tiers": _tiers(card),
            "pricing": self._pricing(card.model),
            "ready": model.is_ready,
            "state": model.state,
            "loading_seconds": card.load_seconds or None,
        }

    async def _body_of_alias(
        self, principal: Principal, alias: Alias, model: ServedModel
    ) -> dict[str, Any]:
        """Return the body of the model that runs the tenant's requests, under the alias's name."""
        body = await self._body(principal, model)
        return body | {
            "id": alias.name,
            "aliases": [],
            "resolves_to": model.card.model,
            "deprecated_at": alias.deprecated_at and alias.deprecated_at.isoformat(),
            "sunset_at": alias.sunset_at and alias.sunset_at.isoformat(),
        }

    def _body_of_adapter(
        self, adapter: Adapter, base: ServedModel, body: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the body of an adapter: `body` (its base model) with the differences."""
        unserved = {} if is_runnable(adapter, base.card) else _UNSERVED
        return body | {
            "id": adapter.name,
            "aliases": [f"{name}:{adapter.name}" for name in (base.card.model, *base.card.aliases)],
            "created": int(adapter.created_at.timestamp()),
            # vLLM returns the path of the adapter's files, which is not public here.
            "root": f"sha256:{adapter.sha256}",
            "parent": base.card.model,
            "pricing": self._pricing(adapter.id, base.card.model),
            **unserved,
        }

    def _pricing(self, *names: str) -> dict[str, Any] | None:
        """Return current micro-dollars per million tokens in each tier; None if prices are unknown.

        The first of the names that has a price counts.
        """
        try:
            prices = {tier: self._prices.find_first(names, tier, utc_now()) for tier in ServiceTier}
        except StoreUnavailableError:
            return None
        return {
            tier: {name: getattr(price, name, 0) for name in PRICE_MICROS}
            for tier, price in prices.items()
        }

    async def _tokenizer(self, card: WorkerCard) -> Tokenizer | None:
        """Return the model's tokenizer; None until a worker publishes it."""
        if not card.tokenizer_digest:
            return None
        try:
            return await self._tokenizers.get(card.tokenizer_digest)
        except (RedisError, ServiceUnavailableError):
            return None


@router.get("/anthropic/v1/models", include_in_schema=False)
@router.get("/v1/models", summary="List available models")
async def list_models(
    request: Request,
    form: Annotated[
        Literal["openrouter"] | None,
        Query(alias="format", description="`openrouter`: as OpenRouter reads it from providers."),
    ] = None,
    client_version: Annotated[
        str | None, Query(description="Sent by Codex, which reads its own catalogue in `models`.")
    ] = None,
    limit: _OfPages = None,
    after_id: _OfPages = None,
    before_id: _OfPages = None,
    lifecycle: Annotated[
        list[Lifecycle] | None,
        Query(alias="lifecycle[]", description="Only models in these stages, as in Anthropic's."),
    ] = None,
) -> dict[str, Any]:
    """Return every announced model that the principal may use."""
    services = services_of(request)
    principal = await services[Authorizer].authorize(request, Scope.COMPLETIONS)
    models = await services[ModelList].list(principal)
    if lifecycle is not None:
        models["data"] = [each for each in models["data"] if _lifecycle(each) in lifecycle]
    if client_version is not None:
        # What a model can do is unknown while its first worker loads it, and Codex keeps the list.
        listed = enumerate(body for body in models["data"] if body["features"])
        return models | {"models": [codex_body(body, number) for number, body in listed]}
    page = {"limit": limit, "after_id": after_id, "before_id": before_id}
    given = {name: text for name, text in page.items() if text is not None}
    if form is None and is_anthropic(request.scope):
        return _page(given, [_anthropic_body(model) for model in models["data"]])
    if form is None:
        return models | _page(given, models["data"]) if given else models
    if given:
        raise invalid(next(iter(given)), f"is no parameter of the format {form}.")
    details = services[Settings].openrouter_models
    return {"data": [openrouter_body(body, details) for body in models["data"]]}


@router.get("/anthropic/v1/models/{model_id:path}", include_in_schema=False)
@router.get("/v1/models/{model_id:path}", summary="Retrieve a model")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """Return one model by its id or an alias. Both may contain slashes."""
    services = services_of(request)
    principal = await services[Authorizer].authorize(request, Scope.COMPLETIONS)
    if not model_id:
        raise HTTPException(NotFoundError.status)  # It names the route without a slash.
    model = await services[ModelList].get(principal, model_id)
    return _anthropic_body(model) if is_anthropic(request.scope) else model


def _page(query: Mapping[str, str], bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a page of models: after or before one, `limit` at most."""
    ids = [body["id"] for body in bodies]
    limit = query.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:5]) <= _MOST_OF_PAGE):
        raise must("limit", f"be an integer from 1 to {_MOST_OF_PAGE}", limit)
    for name in ("after_id", "before_id"):
        if (given := query.get(name)) is not None and given not in ids:
            raise must(name, "be the id of a listed model", given)
    after, before = query.get("after_id"), query.get("before_id")
    found = bodies[0 if after is None else ids.index(after) + 1 :]
    page = found[: int(limit)]
    if before is not None:
        found = bodies[: ids.index(before)]
        page = found[-int(limit) :]
    return {
        "data": page,
        "has_more": len(page) < len(found),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _lifecycle(model: Mapping[str, Any]) -> Lifecycle:
    return "deprecated" if model.get("sunset_at") else "active"


def _anthropic_body(model: Mapping[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": model["context_window"],
        "max_tokens": model["context_window"],
        "lifecycle": _lifecycle(model),
        "deprecated_at": model.get("deprecated_at"),
        "retires_at": model.get("sunset_at"),
    }


def openrouter_body(
    body: Mapping[str, Any], details: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the body of a model as OpenRouter has it, with the operator's `details` by model.

    Raises StoreUnavailableError while prices are unknown.
    """
    if body["pricing"] is None:
        raise StoreUnavailableError("The prices cannot be read.", retry_after_seconds=1.0)
    prices, features = body["pricing"][ServiceTier.DEFAULT], body["features"]
    served = {*body["supported_chat_parameters"], *body["supported_parameters"]}
    return {
        "id": body["id"],
        "name": body["id"],
        "created": body["created"],
        "input_modalities": ["text", *["image"] * (Feature.IMAGES in features)],
        "output_modalities": [_OUTPUTS[body["task"]]],
        "context_length": body["context_window"],
        "max_output_length": body["context_window"],
        "pricing": {
            "prompt": _price(prices["prompt_micros"]),
            "completion": _price(prices["completion_micros"]),
            "input_cache_read": _price(prices["cached_micros"]),
            "image": "0",
            "request": "0",
        },
        "supported_sampling_parameters": [name for name in _SAMPLING if name in served],
        "supported_features": [
            *(name for feature in _FEATURES if feature in features for name in _FEATURES[feature]),
            "logprobs",
        ],
        "is_ready": body["ready"],
        **details.get(body["id"], {}),
    }


def codex_body(body: Mapping[str, Any], priority: int) -> dict[str, Any]:
    """Return the body of a model as Codex reads it. Models of a lower priority come first."""
    features, window = body["features"], body["context_window"]
    has_text_tools = Feature.STRICT_TOOLS in features and body["tool_parser"] in HERMES_PARSERS
    has_reasoning = Feature.REASONING in features
    return {
        "slug": body["id"],
        "display_name": body["id"],
        "description": f"{body['id']}, served by {body['owned_by']}.",
        "supported_reasoning_levels": [
            {"effort": effort, "description": f"Reasoning effort {effort}."}
            for effort in _CODEX_EFFORTS
            if has_reasoning
        ],
        "default_reasoning_level": "medium" if has_reasoning else None,
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": priority,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": has_reasoning,
        "support_verbosity": False,
        "default_verbosity": None,
        # Codex sends the tool with its grammar, which only such models follow.
        "apply_patch_tool_type": "freeform" if has_text_tools else None,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": Feature.TOOLS in features,
        "context_window": window,
        "max_context_window": window,
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": ["text", *["image"] * (Feature.IMAGES in features)],
        "additional_speed_tiers": [],
        "web_search_tool_type": "text",
        "supports_image_detail_original": False,
        "supports_search_tool": False,
    }


def _parameters(card: WorkerCard, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return what a model that generates text supports."""
    return {
        "task": "generate",
        "supported_parameters": supported_parameters(
            CompletionRequest.model_fields,
            card.features,
            has_infill=tokenizer is not None and find_template(tokenizer) is not None,
            has_tools=tokenizer is not None and has_tool_calls(tokenizer),
        ),
        "supported_chat_parameters": supported_chat_parameters(
            ChatCompletionRequest.model_fields, card.features
        ),
        "unsupported_parameters": sorted(REJECTED),
        "unsupported_chat_parameters": sorted(REJECTED_BY_CHATS),
    }


def _tiers(card: WorkerCard) -> list[ServiceTier]:
    """Return the tiers in which requests for a model can run; batches have one of their own."""
    has_batches = any(name in BATCH_ENDPOINTS for name in served_endpoints(card))
    return [*REQUEST_TIERS, *[ServiceTier.BATCH] * has_batches]


def _pooling(support: PoolingSupport) -> dict[str, Any]:
    """Return what a pooling model computes."""
    is_embedding = support.task is PoolingTask.EMBED
    bodies: list[type[BaseModel]] = [EmbeddingRequest if is_embedding else ClassificationRequest]
    bodies += [RerankRequest, ScoreRequest] if is_embedding or support.pairs else []
    return {
        "task": support.task,
        "dimensions": support.size if is_embedding else None,
        "has_dimensions": support.has_dimensions,
        "labels": support.labels,
        "supported_parameters": sorted({name for each in bodies for name in each.model_fields}),
        "supported_chat_parameters": [],
        "unsupported_parameters": sorted(REJECTED_BY_POOLING),
        "unsupported_chat_parameters": [],
    }


def _price(micros: int) -> str:
    return f"{Decimal(micros).scaleb(-_PRICE_DIGITS).normalize():f}"
