"""Aliases of models: defined, replaced and removed by operators."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from gateway.database.engine import Database
from gateway.dialects.profile_choice import DEFAULT_MODEL
from gateway.errors import InvalidParameterError, NotFoundError, must, shown
from gateway.management.aliases.store import AliasStore
from gateway.management.audit.log import SYSTEM, AuditLog
from gateway.tenancy.aliases import Alias, Sticky
from gateway.tenancy.changes import ChangeAnnouncer
from gateway.tenancy.checks import check_name
from gateway.tenancy.times import in_utc, utc_now

MAX_MODELS: Final = 32
"""Models of one alias: a request computes a digest for each."""
MAX_WEIGHT: Final = 1_000_000


class AliasService:
    """The aliases of models."""

    def __init__(self, database: Database, announcer: ChangeAnnouncer) -> None:
        self._database = database
        self._announcer = announcer

    async def put(
        self,
        name: str,
        *,
        weights: Mapping[str, int],
        sticky: Sticky = Sticky.TENANT,
        fallback: str | None = None,
        sunset_at: datetime | None = None,
        replacement: str | None = None,
        actor: str = SYSTEM,
    ) -> Alias:
        """Define an alias, or replace the one of this name.

        Args:
            name: what requests call it; hides a model of the same name.
            weights: shares of the callers by model; the ids under which workers announce them.
            sticky: whose requests go to the same model.
            fallback: the model of requests whose own has no worker.
            sunset_at: when requests for the alias begin to fail, with an error that names the
                replacement.
            replacement: what to use instead; default: the model with the largest weight.
            actor: recorded in the audit log.
        """
        _check(name, weights, fallback=fallback, replacement=replacement)
        now = utc_now()
        sunset_at = None if sunset_at is None else in_utc(sunset_at, param="sunset_at")
        async with self._database.writing() as transaction:
            store = AliasStore(transaction)
            old = await store.get(name)
            deprecated_at = None if old is None else old.deprecated_at
            alias = Alias(
                name=name,
                weights=weights,
                sticky=sticky,
                fallback=fallback,
                sunset_at=sunset_at,
                deprecated_at=None if sunset_at is None else deprecated_at or now,
                replacement=replacement or max(weights, key=weights.__getitem__),
                created_at=now if old is None else old.created_at,
            )
            await store.put(alias)
            await AuditLog(transaction).append(
                "alias.set", name, actor=actor, details=_details(alias)
            )
        await self._announcer.aliases_changed()
        return alias

    async def remove(self, name: str, *, actor: str = SYSTEM) -> None:
        """Remove the alias. Raises NotFoundError."""
        async with self._database.writing() as transaction:
            store = AliasStore(transaction)
            _found(await store.get(name), name)
            await store.remove(name)
            await AuditLog(transaction).append("alias.remove", name, actor=actor)
        await self._announcer.aliases_changed()

    async def get(self, name: str) -> Alias:
        """Return the alias. Raises NotFoundError."""
        async with self._database.reading() as transaction:
            return _found(await AliasStore(transaction).get(name), name)

    async def list_all(self) -> list[Alias]:
        """Return all aliases, by name."""
        async with self._database.reading() as transaction:
            return await AliasStore(transaction).list_all()


def read_weights(given: Iterable[str]) -> dict[str, int]:
    """Parse weights given as MODEL or MODEL=WEIGHT. Raises InvalidParameterError."""
    weights: dict[str, int] = {}
    for each in given:
        model, separator, weight = each.rpartition("=")
        if not separator:
            model, weight = each, "1"
        if not (weight.isascii() and weight.isdigit()):
            raise must(
                "models", f"be MODEL or MODEL=WEIGHT with an integer from 0 to {MAX_WEIGHT}", each
            )
        if model in weights:
            raise InvalidParameterError(
                f"'models' must name each model once. Given twice: {shown(model)}.", param="models"
            )
        weights[model] = int(weight[:20])
    return weights


def _check(
    name: str, weights: Mapping[str, int], *, fallback: str | None, replacement: str | None
) -> None:
    check_name(name)
    if name == DEFAULT_MODEL:
        raise InvalidParameterError(
            f"'name' must not be '{DEFAULT_MODEL}', which requests the caller's own model.",
            param="name",
        )
    if not 0 < len(weights) <= MAX_MODELS:
        raise must("weights", f"have 1 to {MAX_MODELS} models", len(weights))
    for model, weight in weights.items():
        check_name(model, param="weights")
        if not 0 <= weight <= MAX_WEIGHT:
            raise InvalidParameterError(
                f"'weights' must be integers from 0 to {MAX_WEIGHT}. "
                f"Given: {weight} for {shown(model)}.",
                param="weights",
            )
    if not any(weights.values()):
        raise InvalidParameterError(
            "'weights' must have a weight greater than 0. Given: only 0.", param="weights"
        )
    for param, value in (("fallback", fallback), ("replacement", replacement)):
        if value is not None:
            check_name(value, param=param)


def _found(alias: Alias | None, name: str) -> Alias:
    if alias is None:
        raise NotFoundError(f"There is no alias {shown(name)}.")
    return alias


def _details(alias: Alias) -> dict[str, Any]:
    return {
        "weights": dict(alias.weights),
        "sticky": alias.sticky,
        "fallback": alias.fallback,
        "sunset_at": alias.sunset_at,
        "replacement": alias.replacement,
    }
