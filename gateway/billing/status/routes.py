"""The state of the service as JSON: `GET /status.json`, for everybody."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Response

from gateway.accounts.routes_common import PLAIN
from gateway.billing.ledger.history import DAYS, FRESH_SECONDS, ServiceHistory
from gateway.billing.status.schemas import ServiceStatus
from gateway.billing.status.service import service_status
from gateway.http.services import provided
from gateway.models.catalogue import Catalogue

CACHE_CONTROL: Final = f"public, max-age={FRESH_SECONDS:.0f}"

router = APIRouter(tags=["Operations"])


@router.get("/status.json", summary="Get the state of the service", response_model=ServiceStatus)
async def get_status(
    service: Annotated[ServiceHistory, provided(ServiceHistory)],
    catalogue: Annotated[Catalogue, provided(Catalogue)],
    days: Annotated[int, Query(ge=1, le=DAYS, description="Days, today included."), PLAIN] = DAYS,
) -> Response:
    """Get the current state of each model, its availability, and its time to the first token.

    It needs no credential, and has no numbers of tenants or of requests. Days are those of UTC.
    """
    status, history = await service_status(service, catalogue, days=days), await service.get()

    async def make() -> bytes:
        return status.model_dump_json().encode()

    return Response(
        await history.once(("json", days), make),
        media_type="application/json",
        headers={"cache-control": CACHE_CONTROL},
    )
