"""CPU time and memory of process groups, and of the rest of the machine, from /proc (Linux)."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLIENT = "load client"
"""Group of this process itself."""

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEBIBYTE = 1024 * 1024
_PROC = Path("/proc")

# Positions in /proc/PID/stat, counted from the field after the command's name.
_PARENT, _RESIDENT = 1, 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    """Resources used between `Meter.start` and `Meter.stop`."""

    wall_seconds: float
    cpu_seconds: dict[str, float]
    """User and system time of each group, including the load client."""
    resident_mib: dict[str, float]
    """Resident memory of each group at the end."""
    other_seconds: float
    """CPU time of the machine outside every group, which disturbs the measurement."""
    client_wait_seconds: float
    """How long the load client was runnable without a core: its times are late by this."""
    steal_seconds: float
    """Time that the hypervisor gave to other machines."""
    gpu_busy_percent: float | None = None
    """Time in which the GPU ran a kernel, as its driver reports it; None without such a report."""

    @property
    def client_wait_share(self) -> float:
        """The client's wait as a share of the time."""
        return self.client_wait_seconds / self.wall_seconds

    @property
    def other_cores(self) -> float:
        """The disturbance as a number of cores."""
        return self.other_seconds / self.wall_seconds


class Meter:
    """Reads the counters of groups of processes twice and returns the difference."""

    def __init__(self, groups: Mapping[str, Sequence[int]]) -> None:
        self._groups = {**groups, CLIENT: [os.getpid()]}

    def start(self) -> None:
        """Start measuring."""
        self._cpu = self._read_cpu()
        self._busy, self._steal = _machine_seconds()
        self._waited = _wait_seconds()
        self._began = time.perf_counter()

    def stop(self) -> Consumption:
        """Return the resources used since `start`."""
        wall = time.perf_counter() - self._began
        busy, steal = _machine_seconds()
        waited = _wait_seconds()
        cpu = {name: now - self._cpu[name] for name, now in self._read_cpu().items()}
        return Consumption(
            wall_seconds=wall,
            cpu_seconds=cpu,
            resident_mib={
                name: sum(resident_mib(pid) for pid in pids) for name, pids in self._groups.items()
            },
            other_seconds=max(0.0, busy - self._busy - sum(cpu.values())),
            client_wait_seconds=waited - self._waited,
            steal_seconds=steal - self._steal,
        )

    def _read_cpu(self) -> dict[str, float]:
        return {name: sum(map(_cpu_seconds, pids)) for name, pids in self._groups.items()}


def resident_mib(pid: int) -> float:
    """Return the memory of a process; 0 if it has exited."""
    fields = _stat(pid)
    return int(fields[_RESIDENT]) * _PAGE_BYTES / _MEBIBYTE if fields else 0.0


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[_PARENT]), []).append(int(folder.name))
    found: list[int] = []
    waiting = list(children.get(pid, ()))
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], ())
    return found


def pin(pid: int, cores: Sequence[int]) -> None:
    """Let all threads of a process run on these cores only, as well as those that they start."""
    for thread in (_PROC / str(pid) / "task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name; none if it has exited."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds(pid: int) -> float:
    """Return the time of all threads, in nanoseconds where /proc counts hundredths of a second."""
    with suppress(OSError):  # It has exited.
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)
    return 0.0


def _wait_seconds() -> float:
    """Return how long this thread has waited for a core since it started."""
    return int((_PROC / "thread-self" / "schedstat").read_text().split()[1]) / 1e9


def _machine_seconds() -> tuple[float, float]:
    """Return the busy time of all cores, and the stolen time."""
    line = (_PROC / "stat").read_text().partition("\n")[0]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq) / _TICKS_PER_SECOND, steal / _TICKS_PER_SECOND
