"""Limits of alerts and objectives, read from the Prometheus rules as their only source."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

RULES: Final = Path(__file__).parents[1] / "prometheus" / "rules"
RUNBOOKS: Final = "https://sluice.example.com/runbooks"
"""Base URL of the runbooks; an installation replaces it with its own."""

_COMPARISON = re.compile(r"([<>]) (\d+(?:\.\d+)?)\s*(?:$|or\b)")
"""Matches at the end of an expression, or of a branch of it: other comparisons guard divisions."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A threshold beyond which a value is bad."""

    value: float
    is_minimum: bool = False
    """Whether values below the limit, not above it, are bad."""


@cache
def alerts() -> dict[str, list[dict[str, Any]]]:
    """Return the rules of every alert by name; an alert with two severities has two rules."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RULES.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    found.setdefault(rule["alert"], []).append(rule)
    return found


def alert_limit(alert: str) -> Limit:
    """Return the limit of an alert.

    Raises:
        ValueError: The alert's expression does not end with a comparison with one number.
    """
    expressions = [rule["expr"] for rule in alerts()[alert]]
    match [found for expr in expressions for found in _COMPARISON.findall(expr)]:
        case [(sign, value)]:
            return Limit(float(value), is_minimum=sign == "<")
        case comparisons:
            raise ValueError(f"{alert} has {len(comparisons)} limits: {expressions}")


def runbook(alert: str) -> str:
    """Return the URL of an alert's runbook."""
    (address,) = {rule["annotations"]["runbook_url"] for rule in alerts()[alert]}
    return str(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A service level objective over 30 days. `ops/prometheus/rules/slo.yaml` has its rules."""

    alert: str
    bad: str
    """Recording rule of the error ratio, without the window suffix."""
    target: float

    @property
    def budget(self) -> float:
        """The error budget as a share."""
        return round(1 - self.target, 6)


PAGING_BURN_RATES: Final = {"1h": 14.4, "6h": 6.0}
"""Burn rates that page, by window: errors as a multiple of the rate that the objective allows."""
AVAILABILITY: Final = Objective(
    alert="SluiceAvailabilityBudgetBurn",
    bad="namespace:sluice_gateway_failed_requests:ratio_rate",
    target=0.999,
)
FIRST_TOKEN: Final = Objective(
    alert="SluiceFirstTokenBudgetBurn",
    bad="namespace_model:sluice_gateway_late_first_tokens:ratio_rate",
    target=0.99,
)
INTER_TOKEN: Final = Objective(
    alert="SluiceInterTokenBudgetBurn",
    bad="namespace_model:sluice_gateway_late_tokens:ratio_rate",
    target=0.99,
)
