"""What a request asks for, wholly checked: everything that comes before the queue (rooms 3 and 4)."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from contract.messages import WorkerCard
from contract.tier import ServiceTier
from gateway.api.context import ProcessContext
from gateway.auth.principal import Principal
from gateway.dialects.choice import choose_model, choose_profile
from gateway.dialects.completions import (
    CompletionRequest,
    require_model,
    to_generation_request,
)
from gateway.dialects.profile import Profile
from gateway.dialects.request import GenerationRequest
from gateway.dialects.support import check_supported, refuse_ignored
from gateway.dialects.wire import validate
from gateway.dispatch.catalogue import ServedModel
from gateway.errors import MissingParameterError, ModelNotFoundError, queue_unavailable
from gateway.prompt.infill import find_template
from gateway.prompt.preparation import PreparedRequest, prepare
from gateway.structure.pool import TokenizerSource
from gateway.structure.tools import has_tool_calls


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that can be run as it stands."""

    request: GenerationRequest
    card: WorkerCard
    prepared: PreparedRequest
    grammar: str
    """What the text must match, compiled; empty if it need not match anything."""
    service_tier: ServiceTier

    @property
    def model(self) -> str:
        """The model's name as the client gave it, else its own."""
        return self.request.model or self.card.model

    @property
    def most_prompt_tokens(self) -> int:
        """Prompt tokens that the request may come to."""
        if any(self.request.images):
            # How many tokens images expand to is known only when the engine has read them.
            return len(self.prepared.prompts) * (self.card.context_window - 1)
        return sum(len(prompt.token_ids) for prompt in self.prepared.prompts)

    @property
    def most_completion_tokens(self) -> int:
        """Completion tokens that the request may come to, those that `best_of` discards included."""
        return sum(prompt.max_tokens for prompt in self.prepared.prompts) * self.request.best_of


async def profile_of(
    context: ProcessContext, principal: Principal, body: dict[str, Any], *, header: str | None
) -> Profile:
    """Return the profile in which a body is read. Raises InvalidParameterError for a wrong header."""
    dialect = ""
    if header is None and principal.dialect is None:
        dialect = await _dialect_of_model(context, principal, body.get("model"))
    return choose_profile(header, principal, model_dialect=dialect, settings=context.settings)


async def make_plan(
    context: ProcessContext, principal: Principal, body: dict[str, Any], profile: Profile
) -> Plan:
    """Check a request against its dialect, its model and the context window. Raises an ApiError."""
    name = choose_allowed(context, principal, require_model(body, profile), profile=profile)
    wire = validate(CompletionRequest, body)
    request = to_generation_request(wire, profile, max_prompts=context.settings.max_prompts)
    if principal.is_strict:
        refuse_ignored(request.ignored_parameters)
    try:
        card = (await context.catalogue.find(name)).card
        tokenizer = await context.tokenizers.get(card.tokenizer_digest)
    except RedisError:
        raise queue_unavailable() from None
    request = check_supported(
        request,
        card.features,
        has_infill=find_template(tokenizer) is not None,
        has_tools=has_tool_calls(tokenizer),
        max_images=card.max_images,
    )
    prepared = await prepare(request, tokenizer, card)
    grammar = await _grammar(context, request, card)
    tier = request.service_tier or principal.service_tier
    return Plan(request, card, prepared, grammar, tier)


async def _grammar(context: ProcessContext, request: GenerationRequest, card: WorkerCard) -> str:
    subject = request.structure or request.tool_use
    if subject is None:
        return ""
    digest = card.tokenizer_digest
    tokenizer = TokenizerSource(
        digest,
        partial(context.tokenizers.file, digest),
        eos_token_ids=card.eos_token_ids,
        vocabulary_size=card.vocabulary_size,
    )
    return await context.grammars.compile(subject, tokenizer=tokenizer)


async def find_card(
    context: ProcessContext, principal: Principal, name: str | None, *, profile: Profile
) -> WorkerCard:
    """Return the card of the model that is asked for; `name` None asks for the principal's own.

    Raises what `choose_allowed` raises, ModelLoadingError or NoWorkerError, and RedisError if nothing is
    known.
    """
    chosen = choose_allowed(context, principal, name, profile=profile)
    return (await context.catalogue.find(chosen)).card


def choose_allowed(
    context: ProcessContext, principal: Principal, name: str | None, *, profile: Profile
) -> str:
    """Return the name of the model that is asked for; `name` None asks for the principal's own.

    Raises ModelNotFoundError for a model that the principal may not use, just as for an unknown one, and
    MissingParameterError.
    """
    catalogue = context.catalogue
    chosen = choose_model(name, principal, catalogue.names)
    if catalogue.known(chosen) is None and profile.takes_any_model_name:
        chosen = _only_model(principal, catalogue.names) or chosen
    if not _is_allowed(principal, chosen, catalogue.known(chosen)):
        raise ModelNotFoundError(chosen)
    return chosen


async def _dialect_of_model(context: ProcessContext, principal: Principal, name: object) -> str:
    """Return the dialect of the model that a body seems to ask for; empty if there is none."""
    asked = name if isinstance(name, str) else None
    try:
        chosen = choose_model(asked, principal, context.catalogue.names)
        model = await context.catalogue.look_up(chosen)
    except (MissingParameterError, RedisError):
        return ""
    return model.card.dialect if model and _is_allowed(principal, chosen, model) else ""


def _is_allowed(principal: Principal, name: str, model: ServedModel | None) -> bool:
    return principal.allows_model(name) or (
        model is not None and principal.allows_model(model.card.model)
    )


def _only_model(principal: Principal, served: AbstractSet[str]) -> str | None:
    usable = [model for model in served if principal.allows_model(model)]
    return usable[0] if len(usable) == 1 else None
