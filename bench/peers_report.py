"""Format the comparison with other gateways as tables."""

from collections.abc import Callable, Iterator, Mapping
from statistics import median

from bench.measure import Measurement
from bench.peer_systems import DIRECT, GATEWAY, NGINX
from bench.peers import FULL_SPEED, LONG, REQUESTS, SHORT, PeersMeasurement, StreamMemory
from bench.tables import table

Figure = Callable[[Measurement], float]
Rounds = Mapping[int, Measurement]

_NONE = "-"


def section(found: PeersMeasurement) -> str:
    """Return the summary; the loads have their own tables."""
    systems = list(dict.fromkeys(each.system for each in found.loads))
    gateways = [name for name in systems if name != DIRECT]
    cpu = [
        "gateway, CPU us",
        "a request",
        "over nginx",
        "a token of 64",
        "over nginx",
        "a token of 250",
        "over nginx",
        "all parts: a request",
        "a token of 64",
        "a token of 250",
    ]
    rest = [
        "system",
        "requests/s",
        "tokens/s",
        "added at half load, p50 / p99 ms",
        "memory of a stream, KiB: gateway",
        "all parts",
        "streams",
        "admitted / limit",
    ]
    lines = [
        "## peers: summary\n",
        f"- {', '.join(found.versions)}",
        *(f"- {sentence}" for sentence in found.skipped),
        "",
        *table(cpu, [_cpu_row(found, name) for name in gateways]),
        "",
        *table(rest, [_rest_row(found, name) for name in systems]),
        "",
    ]
    return "\n".join(lines)


def _cpu_row(found: PeersMeasurement, system: str) -> list[str]:
    row, everything = [system], []
    for load in (REQUESTS, SHORT, LONG):
        ours, nginx = (found.rounds(name, found.sized(load).title) for name in (system, NGINX))
        of = _request_cpu if load is REQUESTS else _token_cpu
        row += [_median(ours, of), _over(ours, nginx, of)]
        everything.append(_median(ours, _all_parts(per_request=load is REQUESTS)))
    return row + everything


def _rest_row(found: PeersMeasurement, system: str) -> list[str]:
    requests, streams = (
        found.rounds(system, found.sized(load).title) for load in (REQUESTS, FULL_SPEED)
    )
    memory = next((each for each in found.memory if each.system == system), None)
    quota = next((each for each in found.quotas if each.system == system), None)
    return [
        system,
        _median(requests, lambda each: each.requests_per_second, digits=0),
        _median(streams, lambda each: each.tokens_per_second, digits=0),
        _added(found, system),
        *_memory(memory),
        _NONE if quota is None else f"{quota.admitted} / {quota.limit} of {quota.sent}",
    ]


def _memory(memory: StreamMemory | None) -> Iterator[str]:
    if memory is None:
        yield from (_NONE, _NONE, _NONE)
    else:
        yield f"{memory.kib_per_stream(GATEWAY):.1f}"
        yield f"{sum(map(memory.kib_per_stream, memory.grown_mib)):.1f}"
        yield str(memory.streams)


def _added(found: PeersMeasurement, system: str) -> str:
    """Return by how much a response is later than the backend's, as the median of pairs."""
    title = found.half_loads.get(system, "")
    ours, direct = (found.rounds(name, title) for name in (system, DIRECT))
    pairs = [(each.ttft, direct[number].ttft) for number, each in ours.items() if number in direct]
    if not pairs:
        return _NONE
    p50 = median(own.p50 - theirs.p50 for own, theirs in pairs)
    p99 = median(own.p99 - theirs.p99 for own, theirs in pairs)
    return f"{p50:.1f} / {p99:.1f}"


def _request_cpu(measurement: Measurement) -> float:
    return measurement.cpu_us_per_request(GATEWAY)


def _token_cpu(measurement: Measurement) -> float:
    return measurement.cpu_us_per_token(GATEWAY)


def _all_parts(*, per_request: bool) -> Figure:
    def figure(each: Measurement) -> float:
        cost = each.cpu_us_per_request if per_request else each.cpu_us_per_token
        return sum(map(cost, each.front_groups))

    return figure


def _median(rounds: Rounds, figure: Figure, *, digits: int = 1) -> str:
    return f"{median(map(figure, rounds.values())):,.{digits}f}" if rounds else _NONE


def _over(ours: Rounds, nginx: Rounds, figure: Figure) -> str:
    """Return the median of the ratios to nginx in the same round."""
    ratios = [
        figure(each) / figure(nginx[number]) for number, each in ours.items() if number in nginx
    ]
    return f"**{median(ratios):.2f}**" if ratios else _NONE
