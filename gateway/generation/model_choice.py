"""Choose the model and the dialect of a request, among those that its caller may use."""

from collections.abc import Set as AbstractSet
from typing import Any

from redis.exceptions import RedisError

from contract.messages import WorkerCard
from gateway.auth.principal import Principal
from gateway.dialects.profile import Profile
from gateway.dialects.profile_choice import choose_model, choose_profile
from gateway.dispatch.catalogue import ServedModel
from gateway.errors import MissingParameterError, ModelNotFoundError
from gateway.http.context import ProcessContext


async def profile_of(
    context: ProcessContext, principal: Principal, body: dict[str, Any], *, header: str | None
) -> Profile:
    """Return the profile for a body. Raises InvalidParameterError for an invalid header."""
    dialect = ""
    if header is None and principal.dialect is None:
        dialect = await _dialect_of_model(context, principal, body.get("model"))
    return choose_profile(header, principal, model_dialect=dialect, settings=context.settings)


async def find_card(
    context: ProcessContext, principal: Principal, name: str | None, *, profile: Profile
) -> WorkerCard:
    """Return the card of the requested model; if `name` is None, of the principal's default.

    Raises the errors of `choose_allowed`, ModelLoadingError, NoWorkerError, and RedisError if no
    model is known.
    """
    chosen = choose_allowed(context, principal, name, profile=profile)
    return (await context.catalogue.find(chosen)).card


def choose_allowed(
    context: ProcessContext, principal: Principal, name: str | None, *, profile: Profile
) -> str:
    """Return the name of the requested model; if `name` is None, of the principal's default.

    Raises MissingParameterError, and ModelNotFoundError both for an unknown model and for one that
    the principal may not use.
    """
    catalogue = context.catalogue
    chosen = choose_model(name, principal, catalogue.names)
    if catalogue.known(chosen) is None and profile.takes_any_model_name:
        chosen = _only_model(principal, catalogue.names) or chosen
    if not _is_allowed(principal, chosen, catalogue.known(chosen)):
        raise ModelNotFoundError(chosen)
    return chosen


async def _dialect_of_model(context: ProcessContext, principal: Principal, name: object) -> str:
    """Return the dialect of the model that a body appears to request; empty if there is none."""
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
