"""What a load needs, by the formulas and costs of docs/capacity.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Any, Final, NamedTuple, Self

from pydantic import BaseModel, Field, ValidationError

from gateway.records.errors import InvalidParameterError, must, shown

_MOST: Final = 1e9
Positive = Annotated[float, Field(gt=0, le=_MOST)]
Least = Annotated[int, Field(ge=1, le=_MOST)]
Count = Annotated[int, Field(ge=0, le=_MOST)]
Share = Annotated[float, Field(ge=0, le=1)]


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

BYTES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SECOND: Final = 1e6
BUSY: Final = 0.6
"""Share of a core that a gateway or `sluice jobs` may use: a core that is nearly full delays all
tokens."""
REDIS_BUSY: Final = 0.5
"""Share of a core that a Redis server may use: it has one thread."""
WORKER_BUSY: Final = 0.8
"""Share of a worker's sequences that may run: the rest absorbs bursts while another one loads."""
MEASURED: Final = {name: each.value * BYTES.get(each.unit, 1) for name, each in COSTS.items()}
"""The costs in microseconds and bytes."""
RETENTION_SECONDS: Final = 120
DAY_SECONDS: Final = 86_400
MEMORY_FACTOR: Final = 4
"""`maxmemory` over the need: forks for persistence, bursts, and long prompts."""


class Load(BaseModel, frozen=True):
    """What a deployment must serve, at its busiest minute.

    The titles, descriptions and bounds are those of the command and of the console.
    """

    requests: Positive = Field(
        title="Requests a second", description="Requests a second, at the busiest minute."
    )
    prompt_tokens: Positive = Field(
        title="Prompt tokens", description="Prompt tokens of a request, mean."
    )
    completion_tokens: Positive = Field(
        title="Completion tokens", description="Completion tokens of a request, mean."
    )
    first_token: Positive = Field(
        0.5, title="First token", description="Most seconds to the first token."
    )
    token_gap: Positive = Field(
        0.025, title="Token gap", description="Most seconds between two tokens."
    )
    sequences: Least = Field(
        256,
        title="Sequences",
        description="Largest batch of a worker whose step takes less than the token gap: measure "
        "it.",
    )
    kv_tokens: Least | None = Field(
        None,
        title="KV tokens",
        description="Tokens of a worker's KV cache, from its log. Empty: sequences always fit.",
    )
    traced: Share = Field(0.1, title="Traced", description="Share of the requests with traces.")
    tenants: Count = Field(10_000, title="Tenants", description="Tenants with limits.")
    waiting: Count = Field(
        10_000, title="Waiting jobs", description="Most waiting jobs of a model."
    )
    mean: Share = Field(
        0.1,
        title="Mean load",
        description="Requests of a mean second over those of the busiest minute.",
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return the load with these values. Raises InvalidParameterError."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name, given = str(problem["loc"][0]), problem.get("input")
            raise InvalidParameterError(
                f"'{name}': {problem['msg']}. Given: {shown(given)}.", param=name
            ) from None


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
        raise must("kv_tokens", f"be at least {ceil(tokens)}, for one request", load.kv_tokens)
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
    memory = f"{ceil(2 * needed.gateway_memory / BYTES['MiB'])}Mi"
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
        most = ceil(_maxmemory(needed) / BYTES["MiB"])
        values["redis"] = {"bundled": {"maxMemoryMiB": most}}
    return values


def _maxmemory(needed: Plan) -> float:
    return MEMORY_FACTOR * needed.redis_memory / needed.redis_servers


def _cores(cores: float) -> str:
    return f"{cores:.2f} cores"


def _size(size: float) -> str:
    unit = next((each for each in ("MiB", "GiB") if size < 1000 * BYTES[each]), "GiB")
    return f"{size / BYTES[unit]:,.{0 if unit == 'MiB' else 1}f} {unit}"
