"""All faults that the suite injects into a deployment under load."""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from tests.failures.chaos.clock_library import HINT, library, set_clock
from tests.failures.chaos.deployment import CLOCKED, LOOK_SECONDS, Deployment, Member
from tests.failures.proofs.differences import difference
from tests.support.redis_cluster import RedisClusterServers
from tests.support.redis_server import RedisServer

FULL_DISK_BYTES = 4096
"""Limit of file sizes while the disk is "full"."""
STARTING_SECONDS = 15.0
"""Start time of a process on a busy machine."""
MASTERS = 3
"""Of a cluster, each with a replica."""
MOVED_RESPONSES = 10
"""Slots with stored responses that are moved at once; each response has its own."""
REDIS = "redis"
"""The only Redis; with a number, a master and its replica."""


class Kind(StrEnum):
    """Kinds of faults."""

    KILL_WORKER = "worker killed"
    KILL_PREEMPTING = "worker killed while it preempts"
    STOP_WORKER = "worker stopped (SIGSTOP)"
    RESTART_WORKER = "worker restarted (SIGTERM)"
    KILL_ENGINE = "engine died"
    PARTITION_WORKER = "worker cut off from Redis"
    KILL_GATEWAY = "gateway killed"
    STOP_GATEWAY = "gateway stopped (SIGSTOP)"
    RESTART_GATEWAY = "gateway restarted (SIGTERM)"
    PARTITION_GATEWAY = "gateway cut off from Redis"
    SLOW_NETWORK = "slow network to Redis"
    LOSSY_NETWORK = "lost packets, then a reset"
    KILL_REDIS = "Redis killed"
    STOP_REDIS = "Redis stopped (SIGSTOP)"
    KILL_JOBS = "background jobs killed"
    RESTART_JOBS = "background jobs restarted (SIGTERM)"
    STOP_DATABASE = "PostgreSQL stopped"
    FULL_DISK = "disk full"
    SET_CLOCK = "clock set"
    KILL_BEHIND = "Redis killed while its replica is behind"
    FAIL_OVER = "Redis failed over as planned"
    CUT_SERVER = "gateways cut off from one Redis"
    MOVE_SLOTS = "slots moved"
    ADD_SERVER = "Redis added, used and removed"


CLUSTERED = frozenset(
    {Kind.KILL_BEHIND, Kind.FAIL_OVER, Kind.CUT_SERVER, Kind.MOVE_SLOTS, Kind.ADD_SERVER}
)
"""Faults that only a cluster has."""

WEIGHTS = {
    Kind.KILL_WORKER: 5,
    Kind.STOP_WORKER: 3,
    Kind.RESTART_WORKER: 2,
    Kind.KILL_ENGINE: 4,
    Kind.PARTITION_WORKER: 3,
    Kind.KILL_GATEWAY: 3,
    Kind.STOP_GATEWAY: 2,
    Kind.RESTART_GATEWAY: 2,
    Kind.PARTITION_GATEWAY: 2,
    Kind.SLOW_NETWORK: 2,
    Kind.LOSSY_NETWORK: 2,
    Kind.KILL_REDIS: 1,
    Kind.STOP_REDIS: 1,
    Kind.KILL_JOBS: 1,
    Kind.RESTART_JOBS: 1,
    Kind.STOP_DATABASE: 1,
    Kind.FULL_DISK: 1,
    Kind.SET_CLOCK: 1,
    Kind.KILL_BEHIND: 2,
    Kind.FAIL_OVER: 2,
    Kind.CUT_SERVER: 3,
    Kind.MOVE_SLOTS: 2,
    Kind.ADD_SERVER: 1,
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A scheduled fault."""

    kind: Kind
    seconds: float
    """Duration of a fault that lasts."""
    choice: float
    """Position of the target in its role: 0 is the first, just below 1 the last."""


@dataclass(slots=True)
class Fault:
    """An injected fault."""

    kind: Kind
    target: str
    began: float
    ended: float = 0.0
    """0 until its target serves again."""
    note: str = ""
    lost: dict[str, int] = field(default_factory=dict)
    """Confirmed writes that were lost, by kind."""
    lost_until: float = 0.0
    """Confirmed writes between `began` and this time were lost; 0: none."""

    def reported(self, since: float) -> str:
        """Return one line of the log."""
        end = f"{self.ended - since:7.2f}" if self.ended else "   open"
        return (
            f"{self.began - since:7.2f} - {end} s  {self.kind}: {self.target} {self.note}".rstrip()
        )


def schedule(seed: int, kinds: Sequence[Kind]) -> Iterator[Planned]:
    """Yield faults forever. The same seed and kinds give the same faults."""
    rng = random.Random(seed)
    weights = [WEIGHTS[kind] for kind in kinds]
    while True:
        (kind,) = rng.choices(kinds, weights)
        yield Planned(kind, rng.uniform(0.5, 6.0), rng.random())


def each_once(seed: int, kinds: Sequence[Kind]) -> Iterator[Planned]:
    """Yield one short fault of each kind. The same seed and kinds give the same order."""
    rng = random.Random(seed)
    for kind in rng.sample(kinds, len(kinds)):
        yield Planned(kind, rng.uniform(0.5, 3.0), rng.random())


@dataclass
class FaultInjector:
    """Injects faults into a deployment and logs them."""

    deployment: Deployment
    log: list[Fault] = field(default_factory=list)
    skipped: dict[Kind, str] = field(default_factory=dict)
    """Kinds of faults that are not possible here, with the reason."""
    _is_store_busy: bool = False
    _running: set["asyncio.Task[None]"] = field(default_factory=set)

    def kinds(self) -> list[Kind]:
        """Return the kinds that are possible here; record the others with the reason."""
        if self.deployment.postgres is None:
            self.skipped[Kind.STOP_DATABASE] = "the database is SQLite"
        else:
            self.skipped[Kind.FULL_DISK] = "the database is PostgreSQL"
        if library() is None:
            self.skipped[Kind.SET_CLOCK] = HINT
        if self.deployment.cluster is None:
            self.skipped |= dict.fromkeys(CLUSTERED, "Redis is no cluster")
        return [kind for kind in WEIGHTS if kind not in self.skipped]

    async def run(
        self, plan: Iterator[Planned], *, every: float, is_over: Callable[[], bool]
    ) -> None:
        """Inject a fault each `every` seconds until `is_over`; wait for their ends."""
        while not is_over():
            self.begin(next(plan))
            await asyncio.sleep(every)
        await self.over()

    async def run_all(self, plan: Iterator[Planned], *, every: float) -> None:
        """Inject all planned faults, at least `every` seconds apart; wait for them."""
        for planned in plan:
            while not self.begin(planned):
                await asyncio.sleep(LOOK_SECONDS)
            await asyncio.sleep(every)
        await self.over()

    def begin(self, planned: Planned) -> bool:
        """Inject a fault, unless each possible target has one already; return whether it began."""
        act = _ACTS[planned.kind](self, planned)
        if act is None:
            return False
        self._start(act)
        return True

    async def kill(self, member: Member, kind: Kind = Kind.KILL_WORKER) -> None:
        """Kill this process; return while it restarts."""
        starts = member.starts
        self._start(_kill(self, Planned(kind, 0, 0), member))
        while member.starts == starts:
            await asyncio.sleep(0.01)

    def _start(self, act: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(act)
        self._running.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[None]") -> None:
        """Forget a task, unless it failed: `over` raises its error."""
        if task.cancelled() or task.exception() is None:
            self._running.discard(task)

    async def over(self) -> None:
        """Wait until no fault is active and every process serves."""
        while self._running:
            await asyncio.gather(*self._running)
        await asyncio.gather(
            *(self.deployment.ready(each) for each in self.deployment.members.values())
        )

    def faults_of(self, target: str) -> list[Fault]:
        """Return the faults of a process."""
        return [fault for fault in self.log if fault.target == target]

    def pick(self, planned: Planned, role: str) -> Member | None:
        """Return the target of a fault, a process without another fault; None if there is none."""
        well = [each for each in self.deployment.named(role) if not each.is_busy and each.was_ready]
        return well[int(planned.choice * len(well))] if well else None

    @contextmanager
    def noting(self, kind: Kind, target: str, note: str = "") -> Iterator[Fault]:
        """Log one fault."""
        fault = Fault(kind, target, time.monotonic(), note=note)
        self.log.append(fault)
        yield fault
        fault.ended = time.monotonic()

    @contextmanager
    def noting_member(self, kind: Kind, member: Member, note: str = "") -> Iterator[Fault]:
        """Log a fault of one process, and keep other faults away from it meanwhile."""
        member.is_busy = True
        try:
            with self.noting(kind, member.name, note) as fault:
                yield fault
        finally:
            member.is_busy = False

    @contextmanager
    def noting_store(self, kind: Kind, target: str, note: str = "") -> Iterator[Fault]:
        """Log a fault of Redis or the database. Only one such fault is active at a time."""
        self._is_store_busy = True
        try:
            with self.noting(kind, target, note) as fault:
                yield fault
        finally:
            self._is_store_busy = False

    @property
    def is_store_busy(self) -> bool:
        """Whether Redis or the database has a fault now."""
        return self._is_store_busy


Act = Callable[[FaultInjector, Planned], Coroutine[Any, Any, None] | None]


def _to_member(
    role: str, act: Callable[[FaultInjector, Planned, Member], Coroutine[Any, Any, None]]
) -> Callable[[FaultInjector, Planned], Coroutine[Any, Any, None] | None]:
    def begin(injector: FaultInjector, planned: Planned) -> Coroutine[Any, Any, None] | None:
        member = injector.pick(planned, role)
        return None if member is None else act(injector, planned, member)

    return begin


def _to_store(
    act: Callable[[FaultInjector, Planned], Coroutine[Any, Any, None]],
) -> Callable[[FaultInjector, Planned], Coroutine[Any, Any, None] | None]:
    def begin(injector: FaultInjector, planned: Planned) -> Coroutine[Any, Any, None] | None:
        return None if injector.is_store_busy else act(injector, planned)

    return begin


async def _kill(injector: FaultInjector, planned: Planned, member: Member) -> None:
    with injector.noting_member(planned.kind, member):
        await injector.deployment.kill(member)
        injector.deployment.start(member)
        await injector.deployment.ready(member)


async def _restart(injector: FaultInjector, planned: Planned, member: Member) -> None:
    with injector.noting_member(planned.kind, member) as fault:
        was_ready = member.was_ready
        code = await injector.deployment.terminate(member)
        fault.note = f"exit code {code} after {time.monotonic() - fault.began:.1f} s"
        # Before the program installs its handlers, SIGTERM ends Python at once.
        was_starting = fault.began - member.started_at < STARTING_SECONDS or not was_ready
        is_early = code == -signal.SIGTERM and was_starting
        if code != 0 and not is_early:
            injector.deployment.unexpected_ends.append(
                f"{member.name} ended with {code} by SIGTERM"
            )
        injector.deployment.start(member)
        await injector.deployment.ready(member)


async def _stop(injector: FaultInjector, planned: Planned, member: Member) -> None:
    with injector.noting_member(planned.kind, member, f"for {planned.seconds:.1f} s"):
        injector.deployment.signal(member, signal.SIGSTOP)
        await asyncio.sleep(planned.seconds)
        injector.deployment.signal(member, signal.SIGCONT)
        await injector.deployment.ready(member)


async def _kill_engine(injector: FaultInjector, planned: Planned, member: Member) -> None:
    with injector.noting_member(planned.kind, member):
        injector.deployment.kill_engine(member)
        await asyncio.sleep(0.2)
        await injector.deployment.ready(member)


async def _partition(injector: FaultInjector, planned: Planned, member: Member) -> None:
    seconds = planned.seconds * 1.5
    is_reset = planned.choice * 1000 % 1 < 0.5
    note = f"for {seconds:.1f} s, then {'reset' if is_reset else 'healed'}"
    with injector.noting_member(planned.kind, member, note):
        member.links.silence()
        await asyncio.sleep(seconds)
        if is_reset:
            member.links.reset()
        member.links.clear()
        await injector.deployment.ready(member)


async def _slow(injector: FaultInjector, planned: Planned, member: Member) -> None:
    delay = planned.choice * 1000 % 1 * 0.25
    with injector.noting_member(
        planned.kind, member, f"{delay * 1000:.0f} ms for {planned.seconds:.1f} s"
    ):
        member.links.delay(delay)
        await asyncio.sleep(planned.seconds)
        member.links.delay(0.0)
        await injector.deployment.ready(member)


async def _lossy(injector: FaultInjector, planned: Planned, member: Member) -> None:
    seconds = planned.seconds / 3
    with injector.noting_member(planned.kind, member, f"for {seconds:.1f} s"):
        member.links.silence()
        await asyncio.sleep(seconds)
        member.links.cut()
        await asyncio.sleep(0.3)
        member.links.clear()
        await injector.deployment.ready(member)


async def _kill_redis(injector: FaultInjector, planned: Planned) -> None:
    server, name, settle = _redis(injector, planned)
    with injector.noting_store(planned.kind, name, f"for {planned.seconds:.1f} s"):
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(planned.seconds)
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(settle)


async def _stop_redis(injector: FaultInjector, planned: Planned) -> None:
    server, name, settle = _redis(injector, planned)
    with injector.noting_store(planned.kind, name, f"for {planned.seconds:.1f} s"):
        server.freeze()
        await asyncio.sleep(planned.seconds)
        server.thaw()
        await asyncio.to_thread(settle)


def _redis(
    injector: FaultInjector, planned: Planned
) -> tuple[RedisServer, str, Callable[[], None]]:
    """Return the only Redis, or a master, with its name, and what waits until it has a replica."""
    cluster = injector.deployment.cluster
    if cluster is None:
        return injector.deployment.redis, REDIS, lambda: None
    cluster.note_roles()
    number = _master(planned)
    return cluster.masters[number], f"{REDIS} {number}", partial(cluster.settle, number)


def _master(planned: Planned) -> int:
    """Return the number of a master that has a replica."""
    return int(planned.choice * MASTERS)


def _to_cluster(
    act: Callable[[FaultInjector, Planned, RedisClusterServers, int], Coroutine[Any, Any, None]],
) -> Act:
    def begin(injector: FaultInjector, planned: Planned) -> Coroutine[Any, Any, None]:
        cluster = injector.deployment.cluster
        assert cluster is not None
        cluster.note_roles()
        return act(injector, planned, cluster, _master(planned))

    return _to_store(begin)


async def _kill_behind(
    injector: FaultInjector, planned: Planned, cluster: RedisClusterServers, number: int
) -> None:
    """Let a replica lag, count what it lacks, and kill its master."""
    server, seconds = cluster.masters[number], planned.seconds / 3
    with injector.noting_store(planned.kind, f"{REDIS} {number}") as fault:
        await asyncio.to_thread(cluster.cut_replication, number)
        await asyncio.sleep(seconds)
        # Until the count, no write is confirmed.
        server.command("CLIENT PAUSE 60000 WRITE")
        fault.lost_until = time.monotonic()
        found = await asyncio.to_thread(difference, server, cluster.replicas[number])
        fault.lost = found.lost
        fault.note = (
            f"after {fault.lost_until - fault.began:.1f} s; lost {found.lost}, "
            f"removed in vain {found.revived}"
        )
        await asyncio.to_thread(cluster.fail_over, number)
        await asyncio.to_thread(cluster.restart_replica, number)


async def _fail_over(
    injector: FaultInjector, planned: Planned, cluster: RedisClusterServers, number: int
) -> None:
    with injector.noting_store(planned.kind, f"{REDIS} {number}"):
        await asyncio.to_thread(cluster.switch_over, number)


async def _cut_server(
    injector: FaultInjector, planned: Planned, cluster: RedisClusterServers, number: int
) -> None:
    """Silence the network between all gateways and a master, which the others reach."""
    seconds, port = planned.seconds * 1.5, cluster.masters[number].port
    is_reset = planned.choice * 1000 % 1 < 0.5
    note = f"for {seconds:.1f} s, then {'reset' if is_reset else 'healed'}"
    gateways = injector.deployment.named("gateway")
    with injector.noting_store(planned.kind, f"{REDIS} {number}", note):
        for gateway in gateways:
            gateway.links.lose(port)
        await asyncio.sleep(seconds)
        for gateway in gateways:
            gateway.links.regain(port, is_reset=is_reset)


async def _move_slots(
    injector: FaultInjector, planned: Planned, cluster: RedisClusterServers, number: int
) -> None:
    source, target = cluster.masters[number], cluster.masters[(number + 1) % MASTERS]
    with injector.noting_store(planned.kind, f"{REDIS} {number}") as fault:
        slots = await asyncio.to_thread(_slots_to_move, cluster, source)
        fault.note = f"{len(slots)} to {REDIS} {(number + 1) % MASTERS}"
        await asyncio.to_thread(cluster.move, slots, to=target)


async def _add_server(
    injector: FaultInjector, planned: Planned, cluster: RedisClusterServers, number: int
) -> None:
    """Add a master, move slots to it, and after some seconds to the next one; remove it."""
    members = injector.deployment.members.values()
    with injector.noting_store(planned.kind, f"{REDIS} {number}") as fault:
        slots = await asyncio.to_thread(_slots_to_move, cluster, cluster.masters[number])
        fault.note = f"with {len(slots)} slots for {planned.seconds:.1f} s"
        added = await asyncio.to_thread(cluster.add)
        for member in members:
            await member.links.open(added.port)
        await asyncio.to_thread(cluster.move, slots, to=added)
        await asyncio.sleep(planned.seconds)
        heir = cluster.masters[(number + 1) % MASTERS]
        await asyncio.to_thread(cluster.remove, added, heir=heir)
        for member in members:
            await member.links.close(added.port)


def _slots_to_move(cluster: RedisClusterServers, server: RedisServer) -> list[int]:
    """Return slots of a server in use: of queues, limits and gateways, and of some responses."""
    used = cluster.used_slots(server)
    responses = [slot for slot, name in used.items() if name.startswith(b"{r:")]
    return [slot for slot in used if slot not in responses] + responses[:MOVED_RESPONSES]


async def _stop_database(injector: FaultInjector, planned: Planned) -> None:
    postgres = injector.deployment.postgres
    assert postgres is not None
    with injector.noting_store(planned.kind, "PostgreSQL", f"for {planned.seconds:.1f} s"):
        await asyncio.to_thread(postgres.stop)
        await asyncio.sleep(planned.seconds)
        await asyncio.to_thread(postgres.start)


async def _fill_disk(injector: FaultInjector, planned: Planned) -> None:
    deployment = injector.deployment
    users = [*deployment.named("gateway"), *deployment.named("jobs")]
    with injector.noting_store(planned.kind, "SQLite", f"for {planned.seconds:.1f} s"):
        for member in users:
            deployment.limit_files(member, FULL_DISK_BYTES)
        await asyncio.sleep(planned.seconds)
        for member in users:
            deployment.limit_files(member, -1)


def _set_clock(injector: FaultInjector, planned: Planned) -> Coroutine[Any, Any, None] | None:
    """Set the clock of the last process of a role, if that is possible."""
    roles = [role for role in CLOCKED if role in injector.deployment.clocked]
    role = roles[int(planned.choice * len(roles))]
    member = injector.deployment.named(role)[-1]
    return None if member.is_busy or not member.was_ready else _shift(injector, planned, member)


async def _shift(injector: FaultInjector, planned: Planned, member: Member) -> None:
    offset = (planned.choice * 1000 % 1 - 0.5) * 240
    with injector.noting_member(
        planned.kind, member, f"by {offset:+.0f} s for {planned.seconds:.1f} s"
    ):
        set_clock(injector.deployment.stack.directory, member.name, offset)
        await asyncio.sleep(planned.seconds)
        set_clock(injector.deployment.stack.directory, member.name, 0)
        await injector.deployment.ready(member)


_ACTS: dict[Kind, Act] = {
    Kind.KILL_WORKER: _to_member("worker", _kill),
    Kind.STOP_WORKER: _to_member("worker", _stop),
    Kind.RESTART_WORKER: _to_member("worker", _restart),
    Kind.KILL_ENGINE: _to_member("worker", _kill_engine),
    Kind.PARTITION_WORKER: _to_member("worker", _partition),
    Kind.KILL_GATEWAY: _to_member("gateway", _kill),
    Kind.STOP_GATEWAY: _to_member("gateway", _stop),
    Kind.RESTART_GATEWAY: _to_member("gateway", _restart),
    Kind.PARTITION_GATEWAY: _to_member("gateway", _partition),
    Kind.SLOW_NETWORK: _to_member("worker", _slow),
    Kind.LOSSY_NETWORK: _to_member("gateway", _lossy),
    Kind.KILL_REDIS: _to_store(_kill_redis),
    Kind.STOP_REDIS: _to_store(_stop_redis),
    Kind.KILL_JOBS: _to_member("jobs", _kill),
    Kind.RESTART_JOBS: _to_member("jobs", _restart),
    Kind.STOP_DATABASE: _to_store(_stop_database),
    Kind.FULL_DISK: _to_store(_fill_disk),
    Kind.SET_CLOCK: _set_clock,
    Kind.KILL_BEHIND: _to_cluster(_kill_behind),
    Kind.FAIL_OVER: _to_cluster(_fail_over),
    Kind.CUT_SERVER: _to_cluster(_cut_server),
    Kind.MOVE_SLOTS: _to_cluster(_move_slots),
    Kind.ADD_SERVER: _to_cluster(_add_server),
}
