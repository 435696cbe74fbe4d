"""`sluice capacity`: what a load needs, by the formulas and costs of docs/capacity.md."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final, NamedTuple

import click

from gateway.cli.terminal import JSON, choice, option, print_json, print_table
from gateway.records.errors import must


class Cost(NamedTuple):
    """A measured cost, in microseconds of CPU (`us`) or in bytes (other units)."""

    value: float
    unit: str
    what: str
    measured_with: str


COSTS: Final[Mapping[str, Cost]] = {
    "token": Cost(14.4, "us", "gateway CPU for a token that arrives alone", "tokens"),
    "request": Cost(336, "us", "gateway CPU for a request, with many at once", "peers"),
    "wake_ups": Cost(
        117_000,
        "us",
        "CPU of a gateway, each second, for requests and tokens that share no wake-up",
        "admission",
    ),
    "traced": Cost(200, "us", "gateway CPU for a traced request, if traces are on", "telemetry"),
    "gateway_memory": Cost(143, "MiB", "a gateway process after its first requests", "peers"),
    "stream_memory": Cost(40, "KiB", "a stream in a gateway, with a short prompt", "peers"),
    "token_memory": Cost(
        32, "B", "each token of the prompt and of the response so far, in addition", "memory"
    ),
    "redis_request": Cost(275, "us", "Redis CPU for a request", "admission"),
    "redis_token": Cost(1.1, "us", "Redis CPU for a token", "tokens"),
    "redis_running": Cost(35, "KiB", "a running stream in Redis", "memory"),
    "redis_ended": Cost(
        41, "KiB", "a stream that has ended, kept for `config.answerRetention`, 120 s", "memory"
    ),
    "redis_waiting": Cost(13, "KiB", "a waiting job, until it is claimed and done", "memory"),
    "redis_tenant": Cost(0.3, "KiB", "limits of an active tenant", "memory"),
    "record": Cost(39, "us", "CPU of `sluice jobs` for a usage record", "admission"),
    "ledger_row": Cost(1, "KiB", "a row of the ledger with its indexes (measured: 0.7)", "memory"),
}
"""The costs of docs/capacity.md, by name."""

_BYTES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SECOND: Final = 1e6
BUSY: Final = 0.6
"""Share of a core that a gateway or `sluice jobs` may use: a core that is nearly full delays all
tokens."""
REDIS_BUSY: Final = 0.5
"""Share of a core that a Redis server may use: it has one thread."""
WORKER_BUSY: Final = 0.8
"""Share of a worker's sequences that may run: the rest absorbs bursts while another one loads."""
RETENTION_SECONDS: Final = 120
DAY_SECONDS: Final = 86_400
MEMORY_FACTOR: Final = 4
"""`maxmemory` over the need: forks for persistence, bursts, and long prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a deployment must serve, at its busiest minute."""

    requests: float
    """A second."""
    prompt_tokens: float
    """Of a request, mean."""
    completion_tokens: float
    """Of a request, mean."""
    first_token: float
    """Most seconds to the first token."""
    token_gap: float
    """Most seconds between two tokens."""
    sequences: int
    """The largest batch of a worker whose step takes less than `token_gap`."""
    kv_tokens: int | None
    """Tokens in the KV cache of a worker; None: `sequences` always fit."""
    traced: float
    """Share of the requests that are traced."""
    tenants: int
    waiting: int
    """Most waiting jobs of a model."""
    mean: float
    """Requests of a mean second of the day over those of the busiest minute."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a load needs. CPU is in cores, memory in bytes."""

    seconds: float
    """For which a request runs."""
    running: int
    sequences: int
    workers: int
    gateway_cores: float
    gateways: int
    gateway_memory: float
    """Of each, if one of them is stopped."""
    redis_cores: float
    redis_servers: int
    redis_memory: float
    jobs_cores: float
    jobs: int
    rows: float
    """Of the ledger, a day."""
    disk: float
    """For them."""


def plan(load: Load, costs: Mapping[str, float]) -> Plan:
    """Return what a load needs at these costs, in microseconds and bytes."""
    seconds = load.first_token + load.completion_tokens * load.token_gap
    running = ceil(load.requests * seconds)
    tokens = load.prompt_tokens + load.completion_tokens
    fitting = load.sequences if load.kv_tokens is None else int(load.kv_tokens // tokens)
    if fitting < 1:
        raise must("kv-tokens", f"be at least {ceil(tokens)}, for one request", load.kv_tokens)
    sequences = min(load.sequences, fitting)
    work = (
        load.requests
        * (
            costs["request"]
            + load.completion_tokens * costs["token"]
            + load.traced * costs["traced"]
        )
        / _SECOND
    )
    wake_ups = costs["wake_ups"] / _SECOND
    if wake_ups >= BUSY:
        raise must("cost", f"leave wake_ups below {BUSY * _SECOND:.0f} us", costs["wake_ups"])
    gateways = max(2, ceil(work / (BUSY - wake_ups)))
    streams = running / (gateways - 1)
    redis_cores = (
        load.requests
        * (costs["redis_request"] + load.completion_tokens * costs["redis_token"])
        / _SECOND
    )
    redis_memory = (
        running * costs["redis_running"]
        + load.requests * RETENTION_SECONDS * costs["redis_ended"]
        + load.waiting * costs["redis_waiting"]
        + load.tenants * costs["redis_tenant"]
    )
    jobs_cores = load.requests * costs["record"] / _SECOND
    rows = load.requests * load.mean * DAY_SECONDS
    return Plan(
        seconds=seconds,
        running=running,
        sequences=sequences,
        workers=ceil(running / (WORKER_BUSY * sequences)) + 1,
        gateway_cores=work + gateways * wake_ups,
        gateways=gateways,
        gateway_memory=costs["gateway_memory"]
        + streams * (costs["stream_memory"] + tokens * costs["token_memory"]),
        redis_cores=redis_cores,
        redis_servers=max(1, ceil(redis_cores / REDIS_BUSY)),
        redis_memory=redis_memory,
        jobs_cores=jobs_cores,
        jobs=max(2, ceil(jobs_cores / BUSY)),
        rows=rows,
        disk=rows * costs["ledger_row"],
    )


def rows_of(load: Load, needed: Plan) -> list[tuple[str, str]]:
    """Return the rows of the table."""
    return [
        ("a request runs for", f"{needed.seconds:.4g} s"),
        ("requests that run at once", f"{needed.running:,}"),
        ("tokens a second", f"{load.requests * load.completion_tokens:,.0f}"),
        ("sequences of a worker", f"{needed.sequences:,}"),
        ("workers", f"{needed.workers:,}"),
        ("CPU of all gateways", _cores(needed.gateway_cores)),
        ("gateways", f"{needed.gateways:,}"),
        ("memory of a gateway, if another is stopped", _size(needed.gateway_memory)),
        ("CPU of Redis", _cores(needed.redis_cores)),
        ("Redis servers that share the load", f"{needed.redis_servers:,}"),
        ("memory of Redis, all servers", _size(needed.redis_memory)),
        ("maxmemory of a Redis server", _size(_maxmemory(needed))),
        ("CPU of all `sluice jobs`", _cores(needed.jobs_cores)),
        ("`sluice jobs`", f"{needed.jobs:,}"),
        ("rows of the ledger a day", f"{needed.rows:,.0f}"),
        ("disk for them", _size(needed.disk)),
    ]


def values_of(needed: Plan) -> dict[str, Any]:
    """Return the plan as values for the chart."""
    per_replica = max(int(WORKER_BUSY * needed.sequences), 1)
    memory = f"{ceil(2 * needed.gateway_memory / _BYTES['MiB'])}Mi"
    values: dict[str, Any] = {
        "gateway": {
            "replicaCount": needed.gateways,
            "resources": {"requests": {"cpu": "1", "memory": memory}},
        },
        "worker": {
            "defaults": {
                "engine": {"maxSequences": needed.sequences},
                "autoscaling": {"jobsPerReplica": per_replica, "maxReplicas": 2 * needed.workers},
            }
        },
        "jobs": {"replicaCount": needed.jobs},
    }
    if needed.redis_servers == 1:
        most = ceil(_maxmemory(needed) / _BYTES["MiB"])
        values["redis"] = {"bundled": {"maxMemoryMiB": most}}
    return values


def _maxmemory(needed: Plan) -> float:
    return MEMORY_FACTOR * needed.redis_memory / needed.redis_servers


def _cores(cores: float) -> str:
    return f"{cores:.2f} cores"


def _size(size: float) -> str:
    unit = next((each for each in ("MiB", "GiB") if size < 1000 * _BYTES[each]), "GiB")
    return f"{size / _BYTES[unit]:,.{0 if unit == 'MiB' else 1}f} {unit}"


def _yaml(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _yaml(value, f"{indent}  ")
        else:
            text = f'"{value}"' if isinstance(value, str) else value
            yield f"{indent}{name}: {text}"


def _costs(_context: Any, _param: Any, given: tuple[str, ...]) -> dict[str, float]:
    """Return all costs in microseconds and bytes, with those that are given."""
    values = {name: cost.value for name, cost in COSTS.items()}
    for text in given:
        name, _, number = text.partition("=")
        if name not in COSTS:
            raise must("cost", f"be NAME=NUMBER with a name of {', '.join(COSTS)}", text)
        try:
            values[name] = float(number)
        except ValueError:
            values[name] = -1.0
        if not 0 <= values[name] < _MOST:
            raise must("cost", f"be NAME=NUMBER, with {COSTS[name].unit} from 0", text)
    return {name: value * _BYTES.get(COSTS[name].unit, 1) for name, value in values.items()}


_MOST: Final = 1e9
_POSITIVE: Final = click.FloatRange(0, _MOST, min_open=True)
_COUNT: Final = click.IntRange(0, int(_MOST))
_SHARE: Final = click.FloatRange(0, 1)


def _number(flags: str, text: str, **settings: Any) -> click.Option:
    kind = {"type": _POSITIVE, "required": "default" not in settings}
    return option(flags, text, **{**kind, **settings, "show_default": True})


PARAMS: Final = [
    _number("--requests NUMBER", "Requests a second, at the busiest minute."),
    _number("--prompt-tokens NUMBER", "Prompt tokens of a request, mean."),
    _number("--completion-tokens NUMBER", "Completion tokens of a request, mean."),
    _number("--first-token SECONDS", "Most time to the first token.", default=0.5),
    _number("--token-gap SECONDS", "Most time between two tokens.", default=0.025),
    _number(
        "--sequences NUMBER",
        "Largest batch of a worker whose step takes less than the token gap: measure it.",
        type=click.IntRange(1, int(_MOST)),
        default=256,
    ),
    _number(
        "--kv-tokens NUMBER",
        "Tokens of a worker's KV cache, from its log.  [default: sequences always fit]",
        type=click.IntRange(1, int(_MOST)),
        default=None,
    ),
    _number("--traced SHARE", "Share of the requests with traces.", type=_SHARE, default=0.1),
    _number("--tenants NUMBER", "Tenants with limits.", type=_COUNT, default=10_000),
    _number("--waiting NUMBER", "Most waiting jobs of a model.", type=_COUNT, default=10_000),
    _number(
        "--mean SHARE",
        "Requests of a mean second over those of the busiest minute.",
        type=_SHARE,
        default=0.1,
    ),
    option(
        "--cost costs NAME=NUMBER",
        "Your own measured cost, repeatable; names and units are in docs/capacity.md.",
        multiple=True,
        callback=_costs,
    ),
    choice("--output", ["table", "values"], "A table, or values for the chart.", default="table"),
    JSON,
]

EPILOG = """\
\b
Examples:
  sluice capacity --requests 40 --prompt-tokens 1200 --completion-tokens 400
  sluice capacity --requests 40 --prompt-tokens 1200 --completion-tokens 400 \\
    --kv-tokens 447611 --cost token=11 --output values >values.yaml
"""


@click.command("capacity", params=PARAMS, epilog=EPILOG)
def command(*, costs: dict[str, float], output: str, as_json: bool, **load: Any) -> None:
    """Compute the machines for a load, from measured costs. It contacts no server."""
    asked = Load(**load)
    needed = plan(asked, costs)
    if output == "values":
        if needed.redis_servers > 1:
            click.echo(
                f"# Redis needs {needed.redis_servers} masters: a cluster, whose URL you set "
                "(docs/operations.md)."
            )
        for line in _yaml(values_of(needed)):
            click.echo(line)
    elif as_json:
        print_json({name: getattr(needed, name) for name in Plan.__slots__})
    else:
        print_table(("FIGURE", "VALUE"), rows_of(asked, needed))
