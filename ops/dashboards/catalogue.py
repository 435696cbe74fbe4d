"""List of all dashboards, from customer-facing metrics to machine metrics."""

from collections.abc import Callable
from typing import Final

from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards import engine, gateway, overview, queue, reliability, tenants

DASHBOARDS: Final[tuple[Callable[[], Dashboard], ...]] = (
    overview.build,
    gateway.build,
    queue.build,
    engine.build,
    tenants.build,
    reliability.build,
)
