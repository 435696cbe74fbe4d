"""Cost of the background jobs: when idle, and for each usage record."""

import time
from dataclasses import dataclass
from typing import Final

from redis import Redis

from bench.credentials import Credential
from bench.measure import MeasureError, drive
from bench.processes import Consumption, Meter, descendants
from bench.scenarios import Scenario
from bench.starting import Server
from contract import keys

_START_SECONDS: Final = 5.0
"""Time after which the programs have finished their imports."""
_DRAIN_SECONDS: Final = 120.0
"""How long a drain may take."""
_LOOK_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundCost:
    """CPU of `sluice jobs` and `sluice beat`, and the CPU that they cause in Redis."""

    idle_seconds: float
    """Length of each of the two idle measurements."""
    without: Consumption
    """Idle baseline: Redis alone, with a gateway and a worker."""
    idle: Consumption
    """The same with the jobs running."""
    records: int
    """Requests sent after that."""
    draining: Consumption
    """From the first of them until the last record was in the ledger."""
    drained_seconds: float
    """Time from the last request until the last record was in the ledger."""

    def idle_percent(self, part: str) -> float:
        """CPU of a part when idle, in percent of one core."""
        return 100 * self.idle.cpu_seconds[part] / self.idle.wall_seconds

    def us_per_record(self, part: str) -> float:
        """CPU of a part for each record in microseconds, minus its idle CPU."""
        own, idle = self.draining, self.idle
        share = idle.cpu_seconds[part] / idle.wall_seconds * own.wall_seconds
        return 1e6 * (own.cpu_seconds[part] - share) / self.records


def measure_background(
    credential: Credential, load: Scenario, *, idle_seconds: float, seed: str
) -> BackgroundCost:
    """Run the jobs next to an otherwise idle deployment, then send a load to it.

    Raises StartError or MeasureError.
    """
    redis_pids = credential.groups(1)["redis"]
    with Redis(port=credential.sluice.redis_port) as redis:
        without = _idle(Meter({"redis": redis_pids}), idle_seconds)
        servers: list[Server] = []
        try:
            servers += [credential.sluice.start_command(name) for name in ("jobs", "beat")]
            time.sleep(_START_SECONDS)
            _wait_until_drained(redis, servers)
            groups = {each.name: [each.pid, *descendants(each.pid)] for each in servers}
            meter = Meter({**groups, "redis": redis_pids})
            idle = _idle(meter, idle_seconds)
            meter.start()
            answers, _ = drive(load, credential, seed=f"{seed} background")
            ended = time.perf_counter()
            _wait_until_drained(redis, servers)
            drained_seconds = time.perf_counter() - ended
            return BackgroundCost(
                idle_seconds=idle_seconds,
                without=without,
                idle=idle,
                records=len(answers),
                draining=meter.stop(),
                drained_seconds=drained_seconds,
            )
        finally:
            for server in servers:
                server.stop()


def _idle(meter: Meter, seconds: float) -> Consumption:
    meter.start()
    time.sleep(seconds)
    return meter.stop()


def _wait_until_drained(redis: "Redis", servers: list[Server]) -> None:
    """Wait until no usage record is pending for the ledger."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    while waiting := sum(redis.xlen(keys.usage(bucket)) for bucket in range(keys.BUCKETS)):
        for server in servers:
            server.check()
        if time.monotonic() > deadline:
            raise MeasureError(
                f"{waiting} usage records were not drained in {_DRAIN_SECONDS:.0f} s"
            )
        time.sleep(_LOOK_SECONDS)
