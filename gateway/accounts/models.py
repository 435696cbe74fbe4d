"""Models that workers have announced: `/admin/models`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from gateway.accounts.routes_common import AnyName, ListBody
from gateway.http.authorization import operators_router
from gateway.http.services import provided
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.platform.database.paging import Page
from gateway.records.errors import NotFoundError, StateConflictError, shown

ModelCatalogue = Annotated[Catalogue, provided(Catalogue)]

router = operators_router("Models", "/models")


class ServedModelBody(BaseModel):
    """A model that a worker has announced, and its load."""

    object: Literal["served_model"] = "served_model"
    model: str
    aliases: list[str]
    state: str = Field(description="`ready`, `sleeping`, or the code of the error of its requests.")
    loading_seconds: float | None = Field(description="Time that a worker takes to load it.")
    ready_workers: int
    waiting_jobs: int
    leased_jobs: int

    @classmethod
    def of(cls, model: ServedModel) -> "ServedModelBody":
        """Return the response body of a model."""
        return cls(
            model=model.card.model,
            aliases=list(model.card.aliases),
            state=model.state,
            loading_seconds=model.card.load_seconds or None,
            ready_workers=model.status.ready_workers,
            waiting_jobs=model.status.waiting_jobs,
            leased_jobs=model.status.leased_jobs,
        )


@router.get("", summary="List models with their load", response_model=ListBody[ServedModelBody])
async def list_models(catalogue: ModelCatalogue) -> Page[ServedModelBody]:
    """List every model that a worker has announced, with its workers and its load now."""
    await catalogue.refresh()
    return Page(list(map(ServedModelBody.of, catalogue.models)), has_more=False)


@router.delete("/{name:path}", summary="Remove an unserved model")
async def remove_model(catalogue: ModelCatalogue, name: AnyName) -> ServedModelBody:
    """Remove a model that no worker serves any more. Requests for it get 404 within a second.

    It becomes known again as soon as a worker announces it.
    """
    await catalogue.refresh()
    known = catalogue.known(name)
    if known is None or known.card.model != name:
        raise NotFoundError(f"There is no model {shown(name)}.")
    status = known.status
    waiting = status.waiting_jobs + status.waiting_batch_jobs
    if status.ready_workers or waiting or status.leased_jobs:
        raise StateConflictError(
            f"The model {shown(name)} is in use: {status.ready_workers} workers serve it, "
            f"{waiting} jobs wait and {status.leased_jobs} run. Stop its workers first."
        )
    await catalogue.remove(name)
    return ServedModelBody.of(known)
