"""The committed dashboards, as tests read them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from tests.support.stack import REPOSITORY

FOLDER: Final = REPOSITORY / "ops" / "grafana" / "dashboards"
OF_GRAFANA: Final = {"$__rate_interval": "10s", "$__range": "5m"}
"""Values of Grafana's built-in variables, for a Prometheus that scrapes each second."""

NEED_THE_REAL_ENGINE: Final = {
    "sluice-engine/vLLM/Requests in the engine",
    "sluice-engine/vLLM/Prefix cache hits",
    "sluice-engine/vLLM/Tokens per iteration",
    "sluice-engine/vLLM/KV cache in use",
    "sluice-engine/vLLM/Time of a request by phase",
    "sluice-engine/vLLM/Tokens",
}
"""Panels of vLLM's own metrics, which tests/e2e/test_dashboards.py checks."""

NEED_AN_ADAPTER: Final = {"sluice-engine/Adapters/Mean time of a load"}
"""Panels without data until an adapter is loaded, which no test does while Prometheus scrapes."""

NEED_A_HOST: Final = {
    "sluice-engine/Hosts of several models/Models served",
    "sluice-engine/Hosts of several models/Swaps",
    "sluice-engine/Hosts of several models/Mean time of a start",
}
"""Panels of `sluice host`, whose metrics tests/worker/test_hosting.py reads."""

NEED_A_FULL_ENGINE: Final = {"sluice-engine/Preemption/Wait for a seat"}
"""Panels without data until a job waits for room, which none does while Prometheus scrapes."""

ONLY_ZEROS: Final = {
    "sluice-queue/Batches/Batches by status",
    "sluice-queue/Batches/Lines of batches",
    "sluice-tenants/Tokens/Rejected by limits and money",
    "sluice-reliability/Redis, by server/Failed commands and redirections",
}
"""Stacked panels, which leave out zeros: no test runs batches or exceeds limits meanwhile."""

WITHOUT_DATA: Final = (
    NEED_THE_REAL_ENGINE | NEED_AN_ADAPTER | NEED_A_HOST | NEED_A_FULL_ENGINE | ONLY_ZEROS
)
"""Panels that a deployment of scripted workers leaves empty."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel that is not a row's heading."""

    name: str
    """Dashboard, row and title: `sluice-queue/Waiting/Oldest wait`."""
    json: Mapping[str, Any]

    @property
    def unit(self) -> str:
        """Grafana's name of its unit."""
        return str(self.json["fieldConfig"]["defaults"]["unit"])

    @property
    def queries(self) -> list[Query]:
        """Its queries."""
        return [Query(each["expr"], each.get("legendFormat", "")) for each in self.json["targets"]]

    @property
    def thresholds(self) -> set[float]:
        """Where its colours change."""
        steps = self.json["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
        return {step["value"] for step in steps if step["value"] is not None}


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard."""

    uid: str
    json: Mapping[str, Any]
    panels: tuple[Panel, ...]

    def values_of(self, variable: str) -> str:
        """Return the series that supply a variable's values."""
        (found,) = [each for each in self.json["templating"]["list"] if each["name"] == variable]
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", found["query"])
        assert match is not None
        return f"count by ({match[2]}) ({match[1]})"


@cache
def boards() -> tuple[Board, ...]:
    """Return every dashboard that is committed."""
    return tuple(_read(json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json")))


def with_values(expression: str, namespace: str = ".*") -> str:
    """Return a query as Grafana sends it if everything is selected."""
    for name, value in OF_GRAFANA.items():
        expression = expression.replace(name, value)
    expression = expression.replace("$namespace", namespace)
    return re.sub(r"\$(model|pool|tenant)\b", ".*", expression)


def _read(board: Mapping[str, Any]) -> Board:
    panels: list[Panel] = []
    row = ""
    for each in board["panels"]:
        if each["type"] == "row":
            row = each["title"]
        else:
            panels.append(Panel(f"{board['uid']}/{row}/{each['title']}", each))
    return Board(board["uid"], board, tuple(panels))
