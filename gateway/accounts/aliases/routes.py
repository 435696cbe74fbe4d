"""Aliases of models: `/admin/aliases`."""

from typing import Annotated

from fastapi import APIRouter

from gateway.accounts.aliases.schemas import AliasBody, AliasDefinition, AliasList, RemovedAlias
from gateway.accounts.aliases.service import AliasService
from gateway.accounts.shared.parameters import AnyName
from gateway.http.authorization import CanAdminister, CanSeeEverything
from gateway.http.bounded_route import BoundedRoute
from gateway.http.services import made
from gateway.platform.database.paging import Page

router = APIRouter(prefix="/aliases", tags=["Aliases"], route_class=BoundedRoute)

Aliases = Annotated[AliasService, made(AliasService)]


@router.get("", summary="List aliases")
async def list_aliases(aliases: Aliases, _principal: CanSeeEverything) -> AliasList:
    """List all aliases by name."""
    return AliasList.of(Page(await aliases.list_all(), has_more=False))


@router.get("/{name:path}", summary="Get an alias")
async def get_alias(aliases: Aliases, _principal: CanSeeEverything, name: AnyName) -> AliasBody:
    """Get an alias with the weights of its models."""
    return AliasBody.of(await aliases.get(name))


@router.put("/{name:path}", summary="Define an alias")
async def put_alias(
    aliases: Aliases, principal: CanAdminister, name: AnyName, body: AliasDefinition
) -> AliasBody:
    """Define or replace an alias. Every gateway applies it within a second."""
    return AliasBody.of(await aliases.put(name, **dict(body), actor=principal.actor))


@router.delete("/{name:path}", summary="Remove an alias")
async def remove_alias(aliases: Aliases, principal: CanAdminister, name: AnyName) -> RemovedAlias:
    """Remove the alias. Requests for it get 404 within a second."""
    await aliases.remove(name, actor=principal.actor)
    return RemovedAlias(name=name)
