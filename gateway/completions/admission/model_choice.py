"""Choose the model and the dialect of a request, among those that its caller may use."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError

from contract.messages import WorkerCard
from gateway.completions.context import ProcessContext
from gateway.dialects.profile import Profile
from gateway.dialects.profile_choice import choose_model, choose_profile
from gateway.models.access import allows_served, find_adapter, find_allowed
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.records.adapters import Adapter
from gateway.records.aliases import Alias
from gateway.records.errors import MissingParameterError, ModelNotFoundError
from gateway.records.principal import Principal
from gateway.records.times import utc_now

_EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})


class ModelChoice(NamedTuple):
    """The model of a request."""

    model: str
    """Name of the model, or an alias that its workers announce; the base model of an adapter."""
    alias: Alias | None = None
    """The alias that the request named, if an operator has defined it."""
    adapter: Adapter | None = None
    """The adapter that the request named."""

    async def find(self, catalogue: Catalogue) -> ServedModel:
        """Return the model, which is ready or asleep. Raises as `Catalogue.find` does."""
        try:
            return await catalogue.find(self.model)
        except ModelNotFoundError:
            # The caller does not know which models an alias has.
            raise ModelNotFoundError(self.alias.name if self.alias else self.model) from None


async def profile_of(
    context: ProcessContext, principal: Principal, body: dict[str, Any], *, header: str | None
) -> Profile:
    """Return the profile for a body. Raises InvalidParameterError for an invalid header."""
    dialect = ""
    if header is None and principal.dialect is None:
        dialect = await _dialect_of_model(context, principal, body)
    return choose_profile(header, principal, model_dialect=dialect, settings=context.settings)


async def find_card(
    context: ProcessContext, principal: Principal, name: str | None, *, profile: Profile
) -> WorkerCard:
    """Return the card of the requested model; if `name` is None, of the principal's default.

    Raises the errors of `choose_allowed`, ModelLoadingError, NoWorkerError, and RedisError if no
    model is known.
    """
    choice = choose_allowed(context, principal, name, profile=profile)
    return (await choice.find(context.catalogue)).card


def choose_allowed(
    context: ProcessContext,
    principal: Principal,
    name: str | None,
    *,
    profile: Profile,
    body: Mapping[str, Any] = _EMPTY,
) -> ModelChoice:
    """Return the model for the requested name; if `name` is None, for the principal's default.

    An alias may depend on `user` in the body. Raises MissingParameterError, ModelRetiredError, and
    ModelNotFoundError both for an unknown model and for one that the principal may not use.
    """
    catalogue = context.catalogue
    chosen = choose_model(name, principal, catalogue.names)
    found = find_allowed(catalogue, context.adapters, context.aliases, principal, chosen)
    if isinstance(found, Alias):
        found.check_current(utc_now())
        return ModelChoice(model_of(context, principal, found, body), found)
    if isinstance(found, Adapter):
        return ModelChoice(found.base_model, adapter=found)
    if found is None:
        if profile.takes_any_model_name:
            chosen = _only_model(principal, catalogue.names) or chosen
        if not principal.allows_model(chosen):
            raise ModelNotFoundError(chosen)
    return ModelChoice(chosen)


def model_of(
    context: ProcessContext, principal: Principal, alias: Alias, body: Mapping[str, Any] = _EMPTY
) -> str:
    """Return the model that runs a request of the principal for an alias."""
    user = body.get("user") or body.get("safety_identifier")
    model = alias.choose(principal.tenant_id, user if isinstance(user, str) else "")
    fallback = alias.fallback
    if fallback is None or _is_ready(context, model) or not _is_ready(context, fallback):
        return model
    return fallback


def _is_ready(context: ProcessContext, model: str) -> bool:
    known = context.catalogue.known(model)
    return known is not None and known.is_ready


async def _dialect_of_model(
    context: ProcessContext, principal: Principal, body: Mapping[str, Any]
) -> str:
    """Return the dialect of the model that a body appears to request; empty if there is none."""
    name = body.get("model")
    asked = name if isinstance(name, str) else None
    try:
        chosen = choose_model(asked, principal, context.catalogue.names)
        catalogue = context.catalogue
        alias = context.aliases.find(chosen)
        if alias is None and catalogue.known(chosen) is None:
            adapter = find_adapter(catalogue, context.adapters, principal, chosen)
            if adapter is not None:
                model = await catalogue.look_up(adapter.base_model)
                return model.card.dialect if model else ""
        model = await catalogue.look_up(
            chosen if alias is None else model_of(context, principal, alias, body)
        )
    except (MissingParameterError, RedisError):
        return ""
    if model is None:
        return ""
    if alias is not None:
        is_allowed = alias.is_allowed(principal.allows_model)
    else:
        is_allowed = allows_served(principal, chosen, model)
    return model.card.dialect if is_allowed else ""


def _only_model(principal: Principal, served: AbstractSet[str]) -> str | None:
    usable = [model for model in served if principal.allows_model(model)]
    return usable[0] if len(usable) == 1 else None
