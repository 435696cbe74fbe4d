"""API keys of a deployment, with and without limits, as systems that take turns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bench.sluice import Sluice
from bench.starting import MODEL

_ENOUGH: Final = 10**12
"""A limit that no measurement reaches."""
_LIMITS: Final = (
    "requests_per_minute",
    "tokens_per_minute",
    "prompt_tokens_per_minute",
    "completion_tokens_per_minute",
    "requests_per_day",
    "tokens_per_day",
    "concurrent_requests",
    "budget_micros",
)
_WINDOWS: Final = {
    "key": ("hour", "day", "month"),
    "project": ("day", "month"),
    "tenant": ("hour", "day", "month"),
    "user": ("hour", "day"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """One key of a deployment."""

    name: str
    api_key: str
    sluice: Sluice
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of all requests, in addition to their own."""

    def urls(self, number: int) -> list[str]:
        """Return base URLs of `number` gateways; starts missing ones."""
        return self.sluice.urls(number)

    def key(self, tenant: str) -> str:
        """Return the key, whatever the tenant."""
        del tenant
        return self.api_key

    def groups(self, front_doors: int) -> dict[str, list[int]]:
        """Return the process ids of each part."""
        return self.sluice.groups(front_doors)


def limited(sluice: Sluice, name: str) -> Credential:
    """Return a new key with all limits on itself, its project and its tenant, and with a price."""
    limits = [text for limit in _LIMITS for text in ("--limit", f"{limit}={_ENOUGH}")]
    sluice.create("tenants", "create", "limited", "--id", "limited", *limits)
    project = sluice.create("projects", "create", "bench", "--tenant", "limited", *limits)
    options = ["--tenant", "limited", "--name", "bench", "--project", project["id"], *limits]
    key = sluice.create("keys", "create", *options)
    sluice.create("prices", "add", MODEL, "--prompt", "0.15", "--completion", "0.6")
    return Credential(name=name, api_key=key["key"], sluice=sluice)


def spending(sluice: Sluice, name: str) -> Credential:
    """Return a new key with ten spend limits: on itself, project, tenant and an end user."""
    sluice.create("tenants", "create", "spending", "--id", "spending")
    project = sluice.create("projects", "create", "bench", "--tenant", "spending")
    options = ["--tenant", "spending", "--name", "bench", "--project", project["id"]]
    key = sluice.create("keys", "create", *options)
    holders = {"key": key["id"], "project": project["id"]}
    for scope, windows in _WINDOWS.items():
        holder = ["--holder", holders[scope]] if scope in holders else []
        for window in windows:
            limit = ["--scope", scope, *holder, "--window", window, "--amount", "1000000"]
            sluice.create("spend-limits", "add", "--tenant", "spending", *limit)
    return Credential(name=name, api_key=key["key"], sluice=sluice, fields={"user": "ada"})


def unlimited(sluice: Sluice, name: str) -> Credential:
    """Return a new key without any limit."""
    sluice.create("tenants", "create", "unlimited", "--id", "unlimited")
    key = sluice.create("keys", "create", "--tenant", "unlimited", "--name", "bench")
    return Credential(name=name, api_key=key["key"], sluice=sluice)
