"""Compare what customers and operators depend on with the recorded interface.

The interface is the OpenAPI documents without their prose, the settings, metrics, error codes,
commands and scheduled tasks. `python -m tests.test_interface` records it in `interface.json`,
one line per entry, so that the difference of a commit shows each change.
"""

import importlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
from fastapi import FastAPI
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase
from pydantic_settings import BaseSettings

from common.metrics import LightCounter, LightHistogram
from gateway.cli import main as cli
from gateway.cli import parameters
from gateway.jobs.schedule import TASKS
from gateway.platform.settings import Settings
from gateway.process.app import create_app, create_operator_app
from gateway.records import errors
from scripts import admin_api
from worker.hosting.settings import HostSettings
from worker.settings import WorkerSettings

RECORD = Path(__file__).parent / "interface.json"
WITH_METRICS = (
    "gateway.jobs.telemetry",
    "gateway.platform.store_telemetry",
    "gateway.platform.telemetry",
    "worker.telemetry",
    "worker.hosting.host",
)
PROSE = {"description", "summary", "title", "example", "examples"}


def describe() -> dict[str, Any]:
    """Return the whole interface, by part and name."""
    customers, operators = _applications()
    return {
        "customers": dict(_openapi(customers.openapi())),
        "operators": dict(_openapi(operators.openapi())),
        "settings": {
            "gateway": dict(_settings(Settings)),
            "worker": dict(_settings(WorkerSettings)),
            "host": dict(_settings(HostSettings)),
        },
        "metrics": dict(_metrics()),
        "errors": _errors(),
        "commands": dict(_commands(cli.main, "sluice")),
        "tasks": {task.name: task.track for task in TASKS},
    }


@cache
def _applications() -> tuple[FastAPI, FastAPI]:
    customers = create_app(Settings())
    return customers, create_operator_app(Settings(), customers)


def test_commands_are_made_from_the_admin_api() -> None:
    # `scripts/admin_api.py` writes the file.
    _, operators = _applications()
    assert admin_api.text_of(operators.openapi()) == parameters.FILE.read_text("utf-8")


def test_interface_equals_the_recorded_one() -> None:
    # A change is intended if CHANGELOG.md names it; `python -m tests.test_interface` records it.
    recorded = json.loads(RECORD.read_text())
    found = json.loads(json.dumps(describe()))
    assert recorded.keys() == found.keys()
    for part, entries in found.items():
        assert entries.keys() == recorded[part].keys(), part
        for name, entry in entries.items():
            assert entry == recorded[part][name], (part, name)


def _openapi(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    plain = without_prose(document)
    for path, operations in plain.pop("paths").items():
        for method, operation in operations.items():
            yield f"{method.upper()} {path}", operation
    components = plain.pop("components")
    for kind, named in components.items():
        for name, component in named.items():
            yield f"{kind} {name}", component
    del plain["info"]  # The version changes with each release.
    yield "document", plain


def without_prose(schema: Any, *, names: bool = False) -> Any:
    """Return a part of an OpenAPI document without its texts.

    With `names`, the keys of `schema` are not keywords but names that the API defines.
    """
    match schema:
        case dict():
            return {
                key: without_prose(value, names=key == "properties" and not names)
                for key, value in schema.items()
                if names or key not in PROSE
            }
        case list():
            return [without_prose(item) for item in schema]
        case _:
            return schema


def _settings(settings: type[BaseSettings]) -> Iterator[tuple[str, Any]]:
    prefix = settings.model_config["env_prefix"]
    schema = without_prose(settings.model_json_schema())
    for name, field in schema["properties"].items():
        yield f"{prefix}{name}".upper(), field
    yield "types", schema.get("$defs", {})


def _metrics() -> Iterator[tuple[str, Any]]:
    for module in WITH_METRICS:
        importlib.import_module(module)
    for collector, names in sorted(REGISTRY._collector_to_names.items(), key=lambda item: item[1]):
        if not any(name.startswith("sluice_") for name in names):
            continue
        match collector:
            case MetricWrapperBase():
                yield names[0], [collector._type, *collector._labelnames]
            case LightCounter():
                yield names[0], ["counter", *collector.label_names]
            case LightHistogram():
                yield names[0], ["histogram", *collector.label_names]
            case _:
                yield names[0], []


def _errors() -> dict[str, Any]:
    """Return the statuses, types and retry advice of each code; some classes share a code."""
    found: dict[str, list[Any]] = {}
    classes = [errors.ApiError]
    for each in classes:
        classes += each.__subclasses__()
        variant = [each.status, each.type, each.should_retry]
        if variant not in found.setdefault(each.code, []):
            found[each.code].append(variant)
    return {code: sorted(variants, key=str) for code, variants in found.items()}


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, Any]]:
    yield (
        path,
        [
            [*option.opts, option.type.name]
            for option in command.params
            if not getattr(option, "hidden", False)  # For processes that start others.
        ],
    )
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (subcommand := command.get_command(context, name)) is not None:
                yield from _commands(subcommand, f"{path} {name}")


def record() -> None:
    """Write the interface, one line for each entry."""
    parts = []
    for part, entries in describe().items():
        lines = [
            f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}"
            for name, entry in sorted(entries.items())
        ]
        parts.append(f"{json.dumps(part)}: {{\n" + ",\n".join(lines) + "\n}")
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    record()
