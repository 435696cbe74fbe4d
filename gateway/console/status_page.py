"""`/status`: the state of the service as a page for everybody, without scripts and sessions."""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from gateway.billing.ledger.history import DAYS, ServiceHistory
from gateway.billing.status.routes import CACHE_CONTROL
from gateway.billing.status.schemas import DayStatus, ServiceState, ServiceStatus
from gateway.billing.status.service import service_status
from gateway.console.rendering import SECURITY_HEADERS, policy, render
from gateway.console.routing import PageRoute
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue
from gateway.platform.settings import Settings

STATES: Final = {
    ServiceState.OPERATIONAL: ("good", "Operational"),
    ServiceState.DEGRADED: ("warn", "Degraded"),
    ServiceState.NO_WORKER: ("bad", "No worker"),
    ServiceState.UNAVAILABLE: ("bad", "Unavailable"),
}
"""Class and name of each state."""
GOOD_PERCENT: Final = 99.9
FAIR_PERCENT: Final = 99.0
_HEIGHTS: Final = {"good": 32, "warn": 24, "bad": 16, "none": 4}
"""Not only the color shows how a day was."""
_DAY_WIDTH: Final = 10
_MOST_NAMED: Final = 10
_HEADERS: Final = {
    **SECURITY_HEADERS,
    "cache-control": CACHE_CONTROL,
    "content-security-policy": policy(None),
}

router = APIRouter(route_class=PageRoute, include_in_schema=False)


class Day(NamedTuple):
    """A bar of a strip, in pixels."""

    x: int
    height: int
    kind: str
    title: str


class Strip(NamedTuple):
    """A bar for each day, drawn as SVG."""

    days: list[Day]
    width: int
    height: int
    label: str
    """What the bars show, for those who do not see them."""


@router.get("/status")
async def get_status_page(services: AllServices) -> HTMLResponse:
    """Show the state, availability and latency of each model."""
    status = await service_status(services[ServiceHistory], services[Catalogue])
    history = await services[ServiceHistory].get()
    has_console = services[Settings].console

    async def make() -> str:
        return await asyncio.to_thread(_render, status, has_console=has_console)

    return HTMLResponse(await history.once("page", make), headers=_HEADERS)


def _render(status: ServiceStatus, *, has_console: bool) -> str:
    return render(
        "status.html",
        visitor=None,
        status=status,
        days=DAYS,
        states=STATES,
        strip=strip,
        has_console=has_console,
    )


def strip(days: Sequence[DayStatus]) -> Strip:
    """Return the bars of some days."""
    height = max(_HEIGHTS.values())
    drawn = []
    for number, day in enumerate(days):
        kind = _kind(day.availability)
        drawn.append(Day(number * _DAY_WIDTH, _HEIGHTS[kind], kind, _title(day)))
    return Strip(drawn, len(days) * _DAY_WIDTH, height, _label(days))


def _kind(availability: float | None) -> str:
    if availability is None:
        return "none"
    if availability >= GOOD_PERCENT:
        return "good"
    return "warn" if availability >= FAIR_PERCENT else "bad"


def _title(day: DayStatus) -> str:
    if day.availability is None:
        return f"{day.date}: no data"
    return f"{day.date}: {day.availability:.2f} %"


def _label(days: Sequence[DayStatus]) -> str:
    known = [day for day in days if day.availability is not None]
    lower = [day for day in known if _kind(day.availability) != "good"]
    label = (
        f"Availability of {len(days)} days: {len(known) - len(lower)} with at least "
        f"{GOOD_PERCENT} %, {len(lower)} with less, {len(days) - len(known)} without data"
    )
    latest = ", ".join(map(_title, lower[-_MOST_NAMED:]))
    return f"{label}. The latest with less: {latest}" if latest else label
