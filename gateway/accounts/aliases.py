"""Aliases of models: defined, replaced and removed by operators (`/admin/aliases`)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, Field
from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.accounts.audit.log import SYSTEM
from gateway.accounts.changes import Service, changing
from gateway.accounts.routes_common import AnyName, ListBody, Name, RecordBody, RequestBody
from gateway.dialects.profile_choice import DEFAULT_MODEL
from gateway.http.authorization import Operator, operators_router
from gateway.http.services import made
from gateway.platform.database.paging import Page, find_record, list_records
from gateway.platform.database.tables import AliasRow
from gateway.records.aliases import MAX_WEIGHT, Alias, Sticky
from gateway.records.checks import check_name
from gateway.records.errors import InvalidParameterError, NotFoundError, must, shown
from gateway.records.times import in_utc, utc_now

MAX_MODELS: Final = 32
"""Models of one alias: a request computes a digest for each."""
MAX_FALLBACKS: Final = 8
"""Models to try after the fallback of an alias."""


class AliasService(Service):
    """The aliases of models."""

    async def put(
        self,
        name: str,
        *,
        weights: Mapping[str, int],
        sticky: Sticky = Sticky.TENANT,
        fallback: str | None = None,
        fallbacks: Sequence[str] = (),
        sunset_at: datetime | None = None,
        replacement: str | None = None,
        actor: str = SYSTEM,
    ) -> Alias:
        """Define an alias, or replace the one of this name (see `AliasDefinition`).

        It hides a model of the same name.
        """
        named = {"fallback": fallback, "replacement": replacement}
        named |= {f"fallbacks[{index}]": each for index, each in enumerate(fallbacks)}
        _check(name, weights, named)
        now = utc_now()
        sunset_at = None if sunset_at is None else in_utc(sunset_at, param="sunset_at")
        async with changing(self._database, actor=actor) as change:
            old = await find_record(change.transaction, AliasRow, AliasRow.name == name)
            deprecated_at = None if old is None else old.deprecated_at
            alias = Alias(
                name=name,
                weights=dict(weights),
                sticky=sticky,
                fallback=fallback,
                fallbacks=[*fallbacks],
                sunset_at=sunset_at,
                deprecated_at=None if sunset_at is None else deprecated_at or now,
                replacement=replacement or max(weights, key=weights.__getitem__),
                created_at=now if old is None else old.created_at,
            )
            await change.transaction.merge(AliasRow(**asdict(alias)))
            await change.audit("alias.set", name, _details(alias))
            change.announce(self._announcer.aliases_changed)
        return alias

    async def remove(self, name: str, *, actor: str = SYSTEM) -> None:
        """Remove the alias. Raises NotFoundError."""
        async with changing(self._database, actor=actor) as change:
            await _find(change.transaction, name)
            await change.transaction.execute(delete(AliasRow).where(AliasRow.name == name))
            await change.audit("alias.remove", name)
            change.announce(self._announcer.aliases_changed)

    async def get(self, name: str) -> Alias:
        """Return the alias. Raises NotFoundError."""
        async with self._database.reading() as transaction:
            return await _find(transaction, name)

    async def list_all(self) -> list[Alias]:
        """Return all aliases, by name."""
        async with self._database.reading() as transaction:
            return await list_records(transaction, AliasRow, order=["name"])


def _check(name: str, weights: Mapping[str, int], named: Mapping[str, str | None]) -> None:
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
    if len(named) > 2 + MAX_FALLBACKS:
        raise must("fallbacks", f"have at most {MAX_FALLBACKS} models", len(named) - 2)
    for param, value in named.items():
        if value is not None:
            check_name(value, param=param)


async def _find(transaction: AsyncSession, name: str) -> Alias:
    alias = await find_record(transaction, AliasRow, AliasRow.name == name)
    if alias is None:
        raise NotFoundError(f"There is no alias {shown(name)}.")
    return alias


def _details(alias: Alias) -> dict[str, Any]:
    return {
        "weights": dict(alias.weights),
        "sticky": alias.sticky,
        "fallback": alias.fallback,
        "fallbacks": list(alias.fallbacks),
        "sunset_at": alias.sunset_at,
        "replacement": alias.replacement,
    }


Weight = Annotated[int, Field(strict=True, ge=0, le=MAX_WEIGHT)]
Weights = Annotated[
    dict[Name, Weight],
    Field(
        min_length=1,
        max_length=MAX_MODELS,
        description="Share of the callers by model: the ids under which workers announce them.",
    ),
]


class AliasDefinition(RequestBody):
    """What an alias stands for."""

    weights: Weights
    sticky: Sticky = Field(
        Sticky.TENANT,
        description="Whose requests go to the same model: the tenant's, or those of each `user`.",
    )
    fallback: Name | None = Field(
        None,
        description="Model of requests that their own model cannot run: it has no worker, its "
        "queue is full, or its context window is too short.",
    )
    fallbacks: list[Name] = Field(
        [],
        max_length=MAX_FALLBACKS,
        description="Models to try after `fallback`, in order.",
    )
    sunset_at: AwareDatetime | None = Field(
        None, description="When requests for the alias begin to fail."
    )
    replacement: Name | None = Field(
        None,
        description="What the error after `sunset_at` names. Default: the model with the largest "
        "weight.",
    )


class AliasBody(RecordBody):
    """A public model name that splits its requests over models."""

    object: Literal["model_alias"] = "model_alias"
    name: str
    weights: dict[str, int]
    sticky: Sticky
    fallback: str | None
    fallbacks: list[str]
    sunset_at: datetime | None
    deprecated_at: datetime | None = Field(description="When the alias got its `sunset_at`.")
    replacement: str
    created_at: datetime


class RemovedAlias(BaseModel):
    """A removed alias."""

    object: Literal["model_alias.deleted"] = "model_alias.deleted"
    name: str
    deleted: Literal[True] = True


router = operators_router("Aliases", "/aliases")

Aliases = Annotated[AliasService, made(AliasService)]


@router.get("", summary="List aliases", response_model=ListBody[AliasBody])
async def list_aliases(aliases: Aliases) -> Page[Alias]:
    """List all aliases by name."""
    return Page(await aliases.list_all(), has_more=False)


@router.get("/{name:path}", summary="Get an alias", response_model=AliasBody)
async def get_alias(aliases: Aliases, name: AnyName) -> Alias:
    """Get an alias with the weights of its models."""
    return await aliases.get(name)


@router.put("/{name:path}", summary="Define an alias", response_model=AliasBody)
async def put_alias(
    aliases: Aliases, operator: Operator, name: AnyName, body: AliasDefinition
) -> Alias:
    """Define or replace an alias. Every gateway applies it within a second."""
    return await aliases.put(name, **dict(body), actor=operator.actor)


@router.delete("/{name:path}", summary="Remove an alias")
async def remove_alias(aliases: Aliases, operator: Operator, name: AnyName) -> RemovedAlias:
    """Remove the alias. Requests for it get 404 within a second."""
    await aliases.remove(name, actor=operator.actor)
    return RemovedAlias(name=name)
