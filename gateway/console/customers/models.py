"""Models, aliases and adapters that the visitor may use, with what they can do and cost."""

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from fastapi import APIRouter, Response

from contract.messages import Feature
from contract.tier import ServiceTier
from gateway.completions.endpoints.models import ModelList
from gateway.console.customers.playground import Generates
from gateway.console.routing import CustomerRoute
from gateway.http.services import AllServices

ABILITIES: Final = {
    Feature.CHAT: "chat",
    Feature.IMAGES: "images",
    Feature.TOOLS: "tools",
    Feature.STRUCTURE: "JSON schema",
    Feature.REASONING: "reasoning",
}
TASKS: Final = {"generate": "text", "embed": "embeddings", "classify": "classification"}
STATES: Final = {
    "ready": ("good", "ready"),
    "sleeping": ("warn", "starts with the first request"),
    "model_loading": ("warn", "loading"),
    "no_worker": ("bad", "no worker"),
}
"""Class and text of each state."""
TIERS: Final = (ServiceTier.DEFAULT, ServiceTier.PRIORITY, ServiceTier.FLEX, ServiceTier.BATCH)

router = APIRouter(route_class=CustomerRoute, include_in_schema=False)


@router.get("/console/models")
async def models(visitor: Generates, services: AllServices) -> Response:
    """List models, then aliases, then adapters."""
    groups: dict[str, list[dict[str, Any]]] = {"Models": [], "Aliases": [], "Adapters": []}
    for body in (await services[ModelList].list(visitor.principal))["data"]:
        kind = "Aliases" if "resolves_to" in body else "Adapters" if body["parent"] else "Models"
        groups[kind].append(_row(body))
    return visitor.page("models.html", groups=groups)


def _row(body: dict[str, Any]) -> dict[str, Any]:
    sunset, features = body.get("sunset_at"), body["features"]
    return body | {
        "abilities": [
            TASKS[body["task"]],
            *(text for feature, text in ABILITIES.items() if feature in features),
        ],
        "shown_state": STATES[body["state"]],
        "sunset": sunset and datetime.fromisoformat(sunset),
        "prices": _prices(body["pricing"]),
    }


def _prices(pricing: Mapping[str, Mapping[str, int]] | None) -> list[tuple[str, Mapping[str, int]]]:
    """Return the different prices of a model with the tiers that have each."""
    if pricing is None:
        return []
    found: defaultdict[tuple[int, ...], list[ServiceTier]] = defaultdict(list)
    for tier in TIERS:
        found[tuple(pricing[tier].values())].append(tier)
    return [(", ".join(tiers), pricing[tiers[0]]) for tiers in found.values()]
