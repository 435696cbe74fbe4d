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

CROSSINGS: Final = (
    "sluice-reliability/Resumed streams/Lost attempts by reason: "
    "continued in another exactness class"
)
SILENT: Final[Mapping[str, frozenset[str]]] = {
    "metrics of vLLM's engine": frozenset(NEED_THE_REAL_ENGINE),
    "metrics of `sluice host`, which tests/worker/test_hosting.py reads": frozenset(
        {
            "sluice-engine/Hosts of several models/Models served",
            "sluice-engine/Hosts of several models/Swaps",
            "sluice-engine/Hosts of several models/Mean time of a start",
        }
    ),
    "an adapter, which no worker loads meanwhile": frozenset(
        {
            "sluice-engine/Adapters/Loaded adapters",
            "sluice-engine/Adapters/Loads",
            "sluice-engine/Adapters/Mean time of a load",
        }
    ),
    "what the scripted engine lacks: a queue, a prefix cache, memory that is full": frozenset(
        {
            "sluice-engine/Batch/Sequences: {{pool}} waiting",
            "sluice-engine/Engine memory/Preemptions",
            "sluice-engine/Preemption/Parked sequences",
            "sluice-engine/Preemption/Wait for a seat",
            "sluice-engine/Prefix affinity/Jobs passed over",
            "sluice-overview/Traffic/Tokens: of these cached",
            "sluice-tenants/Tokens/Cached share of prompts",
        }
    ),
    "requests that the load does not send: images, long prompts": frozenset(
        {
            "sluice-engine/Prefix affinity/Chunks of long prompts",
            "sluice-gateway/Processes/Memory: {{instance}} prompts",
            "sluice-gateway/Streams/Images fetched by URL",
        }
    ),
    "canaries, which are off": frozenset(
        {
            "sluice-reliability/Exactness/Canaries by outcome",
            "sluice-reliability/Exactness/Engines that differ from their class",
            "sluice-reliability/Exactness/Time of canaries",
            CROSSINGS,
        }
    ),
    "a fault of a store, an engine, a gateway or the billing system": frozenset(
        {
            "sluice-engine/Failures/Pause before the next engine start",
            "sluice-engine/Failures/Replies: failed",
            "sluice-gateway/Processes/Event loop blocked, by route",
            "sluice-overview/Service level/Firing alerts",
            "sluice-queue/Batches/Time without an ended line",
            "sluice-reliability/Certificates and replies/Engine restarts",
            "sluice-reliability/Certificates and replies/Failed reply writes",
            "sluice-reliability/Database/Failed statements",
            "sluice-reliability/Redis, by server/Failed commands and redirections",
            "sluice-reliability/Redis, by server/Processes that cannot reach it",
            "sluice-reliability/Redis/Failed commands",
            "sluice-reliability/Resumed streams/Responses taken over, messages fenced",
            "sluice-tenants/Background jobs/Abandoned reservations swept",
            "sluice-tenants/Export to billing systems/Batches of exports",
            "sluice-tenants/Export to billing systems/Held for lack of a customer",
            "sluice-tenants/Ledger/Open reservations: overdue",
            "sluice-tenants/Totals of the time range/Not paid",
            "sluice-tenants/Totals of the time range/Overdue reservations",
        }
    ),
}
"""Panels, or queries by their legends, that show nothing or zeros: by what they need."""
WITHOUT_VALUES: Final = frozenset[str]().union(*SILENT.values())


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel."""

    expr: str
    legend: str
    name: str
    """That of the panel, and the legend."""


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
        legends = [(each["expr"], each.get("legendFormat", "")) for each in self.json["targets"]]
        return [Query(expr, legend, f"{self.name}: {legend}") for expr, legend in legends]

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
