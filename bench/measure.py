"""Run a scenario on one system, or on two in turns, and summarize the measurements."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import uvloop

from bench import client
from bench.client import Answer
from bench.processes import CLIENT, Consumption, Meter
from bench.scenarios import Scenario, lanes
from bench.systems import ENGINE_GROUP, System

TIMEOUT_SECONDS = 180.0
"""How long one measurement may take."""

_SETTLE_SECONDS = 2.0
"""A vLLM engine spins for a second after its last step; the next system is measured after that."""
_WARM_UP_TOKENS = 16

Progress = Callable[[str], None]
"""Reports progress to the user."""


class Driver(Protocol):
    """Sends a scenario's requests to a system, once, as `drive` does."""

    def __call__(
        self, scenario: Scenario, system: System, *, seed: str
    ) -> tuple[list[Answer], Consumption]:
        """Return the responses, and the resources used. Raises MeasureError."""
        ...


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of durations, in milliseconds."""

    p50: float
    p99: float
    maximum: float
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One round of one scenario on one system."""

    scenario: str
    system: str
    round: int
    requests: int
    completion_tokens: int
    failures: list[str]
    ttft: Quantiles
    """For a request that is not streamed: the time to the whole response."""
    gap: Quantiles | None
    """Between successive reads of one stream."""
    tokens_per_read: float | None
    tenant_tokens_per_second: dict[str, float]
    used: Consumption

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens of all requests, divided by the time from first send to last end."""
        return self.completion_tokens / self.used.wall_seconds

    @property
    def requests_per_second(self) -> float:
        """Completed requests per second."""
        return self.requests / self.used.wall_seconds

    @property
    def front_groups(self) -> list[str]:
        """The parts of the system other than the engine's own processes."""
        return [name for name in self.used.cpu_seconds if name not in (CLIENT, ENGINE_GROUP)]

    @property
    def front_us_per_token(self) -> float:
        """Total CPU time of these parts for each completion token, in microseconds."""
        return sum(map(self.cpu_us_per_token, self.front_groups))

    def cpu_us_per_token(self, group: str) -> float:
        """CPU time of a group for each completion token, in microseconds."""
        return 1e6 * self.used.cpu_seconds[group] / max(1, self.completion_tokens)

    def cpu_us_per_request(self, group: str) -> float:
        """CPU time of a group for each request, in microseconds."""
        return 1e6 * self.used.cpu_seconds[group] / max(1, self.requests)


class MeasureError(Exception):
    """A system did not behave as the measurement requires."""


def measure_in_turns(
    scenario: Scenario,
    systems: Sequence[System],
    *,
    rounds: int,
    seed: str,
    progress: Progress,
    failed: dict[str, str] | None = None,
    driver: Driver | None = None,
) -> list[Measurement]:
    """Measure each system in each round (A B, B A, A B, ...), after warming up all of them.

    `failed` receives the error of each system that fails; its measurements are left out. Without
    `failed`, the error is raised. `driver` replaces `drive`.
    """
    send = driver or drive
    errors: dict[str, str] = {}

    def attempt(system: System, work: Callable[[], Measurement | None]) -> Measurement | None:
        if system.name in errors:
            return None
        try:
            return work()
        except MeasureError as error:
            if failed is None:
                raise
            errors[system.name] = str(error)
            return None

    for system in systems:
        attempt(system, partial(_warm_up, scenario, system, send, seed=seed))
    measurements = []
    for number in range(1, rounds + 1):
        for system in systems if number % 2 else reversed(systems):
            work = partial(_measure, scenario, system, send, number=number, seed=seed)
            measurement = attempt(system, work)
            if measurement is None:
                continue
            measurements.append(measurement)
            progress(
                f"  round {number}, {system.name}: {measurement.tokens_per_second:.0f} tokens/s, "
                f"{len(measurement.failures)} failures"
            )
    if failed is not None:
        failed.update(errors)
    return [each for each in measurements if each.system not in errors]


def drive(scenario: Scenario, system: System, *, seed: str) -> tuple[list[Answer], Consumption]:
    """Send a scenario's requests to a system, once. Raises MeasureError if it does not finish."""
    load = lanes(scenario, system, seed=seed)
    meter = Meter(system.groups(scenario.gateways))
    try:
        return uvloop.run(client.run(load, meter=meter, timeout_seconds=TIMEOUT_SECONDS))
    except TimeoutError as error:
        raise MeasureError(
            f"{system.name} did not finish {scenario.title} in {TIMEOUT_SECONDS} s"
        ) from error
    except OSError as error:
        raise MeasureError(f"{system.name} does not accept connections: {error}") from error


def quantiles(seconds: Iterable[float]) -> Quantiles:
    """Return the quantiles of durations. Raises ValueError if there are none."""
    values = sorted(1e3 * value for value in seconds)
    if not values:
        raise ValueError("nothing was measured")

    def at(share: float) -> float:
        return values[min(len(values) - 1, int(share * len(values)))]

    return Quantiles(at(0.5), at(0.99), values[-1], len(values))


def _warm_up(scenario: Scenario, system: System, send: Driver, *, seed: str) -> None:
    """Send one short request over each connection, with prompts that are not reused."""
    short = replace(
        scenario,
        requests=1,
        seconds=None,
        completion_tokens=min(_WARM_UP_TOKENS, scenario.completion_tokens),
    )
    answers, _ = send(short, system, seed=f"{seed} {scenario.title} warm-up")
    _refuse_failures(answers, system, most=0)


def _measure(
    scenario: Scenario, system: System, send: Driver, *, number: int, seed: str
) -> Measurement:
    """Measure one round; all systems in it get the same prompts."""
    time.sleep(_SETTLE_SECONDS)
    answers, used = send(scenario, system, seed=f"{seed} {scenario.title} {number}")
    _refuse_failures(answers, system, most=len(answers) - 1)
    good = [answer for answer in answers if not answer.error]
    reads = sum(len(answer.reads) for answer in good)
    gaps = [after - before for answer in good for before, after in pairwise(answer.reads)]
    tokens = sum(answer.completion_tokens for answer in good)
    return Measurement(
        scenario=scenario.title,
        system=system.name,
        round=number,
        requests=len(good),
        completion_tokens=tokens,
        failures=[answer.error for answer in answers if answer.error],
        ttft=quantiles(answer.ttft_seconds for answer in good),
        gap=quantiles(gaps) if gaps else None,
        tokens_per_read=tokens / reads if reads else None,
        tenant_tokens_per_second=_tenant_rates(good),
        used=used,
    )


def _refuse_failures(answers: Sequence[Answer], system: System, *, most: int) -> None:
    failures = [answer.error for answer in answers if answer.error]
    if len(failures) > most:
        raise MeasureError(
            f"{system.name} failed {len(failures)} of {len(answers)} requests: {failures[0]}"
        )


def _tenant_rates(answers: Iterable[Answer]) -> dict[str, float]:
    """Return the tokens per second of each tenant until its own last token."""
    by_tenant: defaultdict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_tenant[answer.tenant].append(answer)
    return {
        tenant: sum(answer.completion_tokens for answer in own)
        / (max(answer.ended for answer in own) - min(answer.sent for answer in own))
        for tenant, own in by_tenant.items()
    }
