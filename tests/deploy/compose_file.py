"""docker-compose.yml as Compose reads it: anchors merged, variables substituted."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.stack import REPOSITORY

FILE: Final = REPOSITORY / "docker-compose.yml"
OVERRIDE: Final = REPOSITORY / "compose.override.example.yaml"
ENVIRONMENT: Final = REPOSITORY / ".env.example"

FILLED_IN: Final = {
    "POSTGRES_PASSWORD": "p0stgres",
    "REDIS_PASSWORD": "r3dis",
    "REDIS_GATEWAY_PASSWORD": "g4teway",
    "REDIS_WORKER_PASSWORD": "w0rker",
    "REDIS_JOBS_PASSWORD": "j0bs",
    "GRAFANA_PASSWORD": "gr4fana",
    "CACHE_SALT_SECRET": "s4lt-for-prefix-caches",
}
"""Example values of an operator for .env."""

PROCESSES: Final = ("gateway", "celery", "beat", "worker")
"""Sluice's services without a profile."""
OURS: Final = (*PROCESSES, "migrate", "seed", "worker-cpu", "worker-gpu", "worker-host")

_VARIABLE: Final = re.compile(r"\$\$|\$\{(?P<name>\w+)(?:(?P<kind>:-|:\?)(?P<text>[^}]*))?\}")


class MissingVariableError(Exception):
    """A required variable has no value."""


@dataclass(frozen=True, slots=True)
class Service:
    """One service with the container's values."""

    name: str
    options: Mapping[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        """What is always set: variables without a value are passed only if .env has them."""
        given = self.options.get("environment", {})
        return {name: str(value) for name, value in given.items() if value is not None}

    @property
    def profiles(self) -> list[str]:
        """The profiles of which one starts it; empty if it always starts."""
        profiles: list[str] = self.options.get("profiles", [])
        return profiles

    @property
    def is_one_shot(self) -> bool:
        """Whether it runs to completion."""
        return self.options.get("restart") != "unless-stopped"

    @property
    def check(self) -> list[str]:
        """The command of the health check, without the word for its form."""
        kind, *command = self.options["healthcheck"]["test"]
        return ["sh", "-c", *command] if kind == "CMD-SHELL" else command

    @property
    def stop_seconds(self) -> float:
        """The grace period for its exit."""
        return seconds(self.options["stop_grace_period"])

    @property
    def mounts(self) -> list[tuple[str, str]]:
        """Mounts by target path."""
        volumes = [volume.split(":") for volume in self.options.get("volumes", [])]
        return [(source, target) for source, target, *_ in volumes]


@cache
def services() -> Mapping[str, Service]:
    """Return every service by name, of every profile."""
    options = interpolated(load(FILE), FILLED_IN)["services"]
    return {name: Service(name, each) for name, each in options.items()}


def load(path: Path) -> Any:
    """Return a file of Compose with anchors merged and variables left as they are."""
    return yaml.load(path.read_text(), _Loader)


def interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    """Return a value with its variables put in. Raises MissingVariableError."""
    if isinstance(value, dict):
        return {name: interpolated(each, variables) for name, each in value.items()}
    if isinstance(value, list):
        return [interpolated(each, variables) for each in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: _value(found, variables), value)
    return value


def variables_of(text: str) -> dict[str, str | None]:
    """Return each variable in a text with its kind: required (`:?`), optional (`:-`) or neither."""
    return {found["name"]: found["kind"] for found in _VARIABLE.finditer(text) if found["name"]}


def seconds(duration: str) -> float:
    """Return a duration such as 1m30s in seconds."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
    parts = re.findall(r"(\d+)(ms|h|m|s)", duration)
    assert "".join(number + unit for number, unit in parts) == duration
    return sum(int(number) * units[unit] for number, unit in parts)


def schema_errors(path: Path) -> str:
    """Return the violations of the Compose Specification's schema; empty if there are none."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, path], capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name, kind = found["name"], found["kind"]
    if name is None:
        return "$"
    if value := variables.get(name, ""):
        return value
    if kind == ":?":
        raise MissingVariableError(name)
    return found["text"] if kind == ":-" else ""


class _Loader(yaml.SafeLoader):
    """Supports the tag with which a list replaces that of another file."""


def _override(loader: _Loader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


_Loader.add_constructor("!override", _override)
