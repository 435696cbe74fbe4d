"""The limits of alerts and objectives, read from the rules: there is no second place for a number."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

RULES: Final = Path(__file__).parents[1] / "prometheus" / "rules"
RUNBOOKS: Final = "https://sluice.example.com/runbooks"
"""Where runbooks are read; whoever installs Sluice puts an address of their own in its place."""

_COMPARISON = re.compile(r"([<>]) (\d+(?:\.\d+)?)\s*(?:$|or\b)")
"""At the end of an expression, or of a branch of it: others guard divisions."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Where something begins to be bad."""

    value: float
    is_minimum: bool = False
    """Whether it is bad below the value, not above."""


@cache
def alerts() -> dict[str, list[dict[str, Any]]]:
    """Return the rules of every alert by its name; one with two severities has two."""
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
        ValueError: its expression does not end with a comparison with one number.
    """
    expressions = [rule["expr"] for rule in alerts()[alert]]
    match [found for expr in expressions for found in _COMPARISON.findall(expr)]:
        case [(sign, value)]:
            return Limit(float(value), is_minimum=sign == "<")
        case comparisons:
            raise ValueError(f"{alert} has {len(comparisons)} limits: {expressions}")


def runbook(alert: str) -> str:
    """Return the address of an alert's runbook."""
    (address,) = {rule["annotations"]["runbook_url"] for rule in alerts()[alert]}
    return str(address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What share of something is to be good over thirty days. `ops/prometheus/rules/slo.yaml` has its rules."""

    alert: str
    bad: str
    """Recorded share of what was bad, without the window at its end."""
    target: float

    @property
    def budget(self) -> float:
        """The share that may be bad."""
        return round(1 - self.target, 6)


PAGING_BURN_RATES: Final = {"1h": 14.4, "6h": 6.0}
"""By window: how many times as often as the objective allows errors may come before somebody is woken."""
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
