"""Format the admission measurements as tables."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

from bench.admission import AdmissionMeasurement, Comparison
from bench.background import BackgroundCost
from bench.measure import Measurement
from bench.processes import CLIENT
from bench.round_trips import RoundTrips
from bench.systems import ENGINE_GROUP
from bench.tables import table

Pair = tuple[Measurement, Measurement]
Figure = Callable[[Measurement], float]


def section(found: AdmissionMeasurement) -> str:
    """Return everything except the loads' own tables."""
    lines = ["## admission: what it adds\n", *(f"- {sentence}" for sentence in found.skipped), ""]
    lines += table(
        ["load", "difference", "of", "median", "ratio", "round by round"],
        [row for each in found.comparisons for row in _rows(each, found.loads)],
    )
    lines.append("")
    if found.authentication_us:
        lines += _authentication(found.authentication_us)
    if found.round_trips:
        lines += _round_trips(found.round_trips)
    if found.background is not None:
        lines += _background(found.background)
    return "\n".join([*lines, ""])


def _rows(comparison: Comparison, loads: Sequence[Measurement]) -> Iterator[list[str]]:
    own = [each for each in loads if each.scenario == comparison.scenario]
    more, less = (
        {each.round: each for each in own if each.system == name}
        for name in (comparison.more, comparison.less)
    )
    pairs = [(more[number], less[number]) for number in sorted(more)]
    for what, figure in _figures(pairs[0]):
        values = [figure(one) - figure(other) for one, other in pairs]
        base = median(figure(other) for _, other in pairs)
        ratio = median(figure(one) for one, _ in pairs) / base if base else None
        shown = ", ".join(f"{value:,.1f}" for value in values)
        yield [
            comparison.scenario,
            f"{comparison.more} - {comparison.less}",
            what,
            f"**{median(values):,.1f}**",
            "-" if ratio is None else f"{ratio:.3f}",
            shown,
        ]


def _figures(pair: Pair) -> Iterator[tuple[str, Figure]]:
    """Yield all comparable figures: CPU of each part, and times if the load had a fixed pace."""
    groups = [each for each in pair[0].used.cpu_seconds if each not in (CLIENT, ENGINE_GROUP)]
    for group in groups:
        yield f"CPU us/request, {group}", partial(_cpu, [group])
    yield "CPU us/request, all parts", partial(_cpu, groups)
    yield "first token p50, ms", lambda one: one.ttft.p50
    yield "first token p99, ms", lambda one: one.ttft.p99


def _cpu(groups: Sequence[str], one: Measurement) -> float:
    """Return the CPU of some parts per request; a missing part costs nothing."""
    return sum(one.cpu_us_per_request(group) for group in groups if group in one.used.cpu_seconds)


def _authentication(microseconds: Sequence[float]) -> list[str]:
    shown = ", ".join(f"{value:.1f}" for value in microseconds)
    return [f"Authentication by a key in memory: **{median(microseconds):.1f}** us ({shown}).", ""]


def _round_trips(counted: Sequence[RoundTrips]) -> list[str]:
    rows = [
        [
            each.system,
            each.part,
            f"**{sum(each.before_first.values()):.2f}**",
            _commands(each.before_first),
            f"{sum(each.in_all.values()):.2f}",
            _commands(each.in_all),
        ]
        for each in counted
    ]
    head = ["system", "part", "before the first token", "these", "in all", "these"]
    requests = counted[0].requests
    return [f"Commands to Redis for one request, mean of {requests}:\n", *table(head, rows), ""]


def _commands(means: dict[str, float]) -> str:
    return ", ".join(f"{name} {mean:.2f}" for name, mean in means.items()) or "none"


def _background(found: BackgroundCost) -> list[str]:
    alone = 100 * found.without.cpu_seconds["redis"] / found.without.wall_seconds
    parts = [name for name in found.idle.cpu_seconds if name != CLIENT]
    rows = [
        [
            part,
            f"{found.idle_percent(part):.2f}",
            f"{found.idle.resident_mib[part]:.0f}",
            f"{found.us_per_record(part):.0f}" if part == "jobs" else "-",
        ]
        for part in parts
    ]
    title = (
        f"Background jobs, {found.idle_seconds:.0f} s with nothing to do, then {found.records} "
        f"records, all in the ledger {found.drained_seconds:.1f} s after the last request "
        f"(Redis without the jobs: {alone:.2f} % of a core):\n"
    )
    return [
        title,
        *table(["part", "idle, % of a core", "resident MiB", "CPU us/record"], rows),
        "",
    ]
