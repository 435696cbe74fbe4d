"""The series that exist, and the names and labels that a query uses."""

import ast
import importlib.util
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.stack import REPOSITORY
from tests.telemetry.page import documented

PROMTOOL: Final = shutil.which("promtool")
RULES: Final = sorted((REPOSITORY / "ops" / "prometheus" / "rules").glob("*.yaml"))
RULE_TESTS: Final = sorted((REPOSITORY / "ops" / "prometheus" / "tests").glob("*.yaml"))
RUNBOOKS: Final = sorted((REPOSITORY / "ops" / "runbooks").glob("*.md"))

OF_TARGETS: Final = frozenset({"instance", "job", "namespace"})
"""Labels that Prometheus adds to each sample."""
OF_WORKERS: Final = OF_TARGETS | {"pool"}
OF_PROMETHEUS: Final = {
    "up": frozenset[str](),
    "ALERTS": frozenset({"alertname", "alertstate", "severity"}),
}
OF_DCGM: Final = tuple(
    f"DCGM_FI_{name}"
    for name in (
        "PROF_GR_ENGINE_ACTIVE",
        "PROF_PIPE_TENSOR_ACTIVE",
        "PROF_DRAM_ACTIVE",
        "DEV_FB_USED",
        "DEV_FB_FREE",
        "DEV_POWER_USAGE",
        "DEV_GPU_TEMP",
        "DEV_XID_ERRORS",
    )
)
"""Gauges that DCGM exporter's default list of counters (`default-counters.csv`) enables."""
LABELS_OF_DCGM: Final = ("Hostname", "gpu", "UUID", "device", "modelName")
OF_THE_CLIENT_LIBRARY: Final = (
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
)
LEVELS: Final = {
    "namespace": frozenset({"namespace"}),
    "namespace_model": frozenset({"namespace", "model"}),
    "namespace_pool": frozenset({"namespace", "pool"}),
}
"""Prefixes of the names of recorded series: what they aggregate by."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_RANGE = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)(?!\w)(?!\s*\()\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_WORDS = frozenset({"and", "or", "unless", "bool"})


@dataclass(frozen=True, slots=True)
class Selectors:
    """The series that an expression uses."""

    series: tuple[tuple[str, frozenset[str]], ...]
    """Names of series, each with the labels that select it."""
    grouped_by: frozenset[str]


@cache
def selectors_of(expression: str) -> Selectors:
    """Return what a PromQL expression uses."""
    bare = _RANGE.sub("", _STRING.sub('""', expression))
    grouped = {
        label.strip() for clause in _GROUPING.findall(bare) for label in clause.split(",") if label
    }
    found = [
        (name, frozenset(_MATCHER.findall(matchers)))
        for name, matchers in _SELECTOR.findall(_GROUPING.sub("", bare))
        if name not in _WORDS and not re.fullmatch(r"e\d+|Inf|NaN", name)
    ]
    return Selectors(tuple(found), frozenset(grouped))


def unknown(expression: str) -> list[str]:
    """Return what an expression uses that no process exports, as sentences."""
    wrong = []
    there = known_series()
    has_any = set(OF_TARGETS)
    about = selectors_of(expression)
    for name, labels in about.series:
        if name not in there:
            wrong.append(f"there is no {name}")
        else:
            wrong += [f"{name} has no label {each}" for each in sorted(labels - there[name])]
            has_any |= there[name]
    wrong += [f"no series has a label {each}" for each in sorted(about.grouped_by - has_any)]
    return wrong


@cache
def known_series() -> dict[str, frozenset[str]]:
    """Return every series that exists, by name, with its labels."""
    known = dict.fromkeys(OF_THE_CLIENT_LIBRARY, OF_WORKERS)
    known |= {name: labels | OF_WORKERS for name, labels in OF_PROMETHEUS.items()}
    known |= dict.fromkeys(OF_DCGM, OF_TARGETS.union(LABELS_OF_DCGM))
    for row in documented():
        of_worker = row.section in {"Worker", "Host", "Every process"}
        labels = row.labels | (OF_WORKERS if of_worker else OF_TARGETS)
        known |= dict.fromkeys(_samples(row.name, row.type), labels)
        if row.type == "histogram":
            known[f"{row.name}_bucket"] = labels | {"le"}
    known |= {name: labels | OF_WORKERS for name, labels in vllm_series().items()}
    known |= {
        rule["record"]: LEVELS[rule["record"].partition(":")[0]]
        for path in RULES
        for rule in rules_of(path)
        if "record" in rule
    }
    return known


@cache
def rules_of(path: Path) -> list[dict[str, Any]]:
    """Return the rules of a file."""
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def vllm_series() -> dict[str, frozenset[str]]:
    """Return the metrics that vLLM's source declares, with their common labels."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "v1" / "metrics" / "loggers.py"
    labels = frozenset({"engine", "model_name"})
    found: dict[str, frozenset[str]] = {}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kind = node.func.attr.strip("_").removesuffix("_cls")
            names = [
                str(each.value.value)
                for each in node.keywords
                if each.arg == "name" and isinstance(each.value, ast.Constant)
            ]
            if kind == "counter":
                names = [f"{name.removesuffix('_total')}_total" for name in names]
            for name in names:
                found |= dict.fromkeys(_samples(name, kind), labels)
                if kind == "histogram":
                    found[f"{name}_bucket"] = labels | {"le"}
    assert len(found) > 50
    return found


def _samples(name: str, kind: str) -> list[str]:
    return [f"{name}_sum", f"{name}_count"] if kind == "histogram" else [name]
