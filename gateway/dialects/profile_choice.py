"""Choose the dialect profile and the model of a request."""

import logging
from collections.abc import Set as AbstractSet
from functools import lru_cache

from contract.dialect import Dialect
from gateway.dialects.profile import PROFILES, Profile
from gateway.platform.settings import Settings
from gateway.records.errors import MissingParameterError, invalid_header, shown
from gateway.records.principal import Principal

DIALECT_HEADER = "X-Api-Dialect"
DEFAULT_MODEL = "default"
"""The model name that mistral.rs clients send to request the only model."""

_DIALECTS = {str(dialect): dialect for dialect in Dialect}

logger = logging.getLogger(__name__)


def choose_profile(
    header: str | None, principal: Principal, *, model_dialect: str, settings: Settings
) -> Profile:
    """Return the profile from the first source that names one.

    The order is: header, key or token, tenant, model, settings.

    Args:
        header: The value of X-Api-Dialect, None if absent.
        principal: The caller.
        model_dialect: The dialect that the model's worker announces; empty if it announces none.
        settings: The gateway's settings.

    Raises InvalidParameterError if the header names no dialect.
    """
    if header is not None:
        return PROFILES[_named(header)]
    return PROFILES[principal.dialect or _announced(model_dialect) or settings.default_dialect]


def choose_model(name: str | None, principal: Principal, served: AbstractSet[str]) -> str:
    """Return the requested model: `name`, or the principal's own model if `name` is None.

    The principal's own model is the tenant's default model, else the only model that the principal
    may use. `served` contains the names of all models. This function does not check whether the
    principal may use the model. Raises MissingParameterError if the request names no model and none
    can be inferred.
    """
    if name is not None and (name != DEFAULT_MODEL or name in served):
        return name
    own = _own_model(principal, served)
    if own is not None:
        return own
    if name is not None:
        return name
    raise MissingParameterError("model")


def dialect_of(header: str) -> Dialect | None:
    """Return the dialect that the header value names, or None if it names none."""
    return _DIALECTS.get(header.strip().lower())


def _named(header: str) -> Dialect:
    dialect = dialect_of(header)
    if dialect is None:
        raise invalid_header(DIALECT_HEADER, f"be one of {', '.join(_DIALECTS)}", header)
    return dialect


@lru_cache(maxsize=256)
def _announced(name: str) -> Dialect | None:
    # Cached, so that the warning is logged once and not for every request of the model.
    if name and name not in _DIALECTS:
        logger.warning("a worker announces the unknown dialect %s", shown(name))
    return _DIALECTS.get(name)


def _own_model(principal: Principal, served: AbstractSet[str]) -> str | None:
    default, allowed = principal.default_model, principal.allowed_models
    if default is not None and principal.allows_model(default):
        return default
    usable = served if allowed is None else (allowed & served) or allowed
    return next(iter(usable)) if len(usable) == 1 else None
