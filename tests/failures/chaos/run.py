"""One run: start everything, use it under faults, let it settle, and check what is left."""

import asyncio
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from contract.messages import WorkerState
from gateway.billing.invoices import InvoiceService
from gateway.platform.database import schema
from gateway.records.limits import MAX_LIMIT, SpendScope
from gateway.records.records import Billing
from gateway.records.times import utc_now
from tests.failures.chaos.batches import Batches
from tests.failures.chaos.deployment import CLOCKED, Deployment, Member, Size, deployed
from tests.failures.chaos.faults import MASTERS, FaultInjector, Kind, each_once, schedule
from tests.failures.chaos.figures import Figures, figures_of
from tests.failures.chaos.history import Behaviour, Ending, History
from tests.failures.chaos.judge import (
    Violation,
    completed_behaviours,
    judge_behaviours,
    judge_growth,
    judge_histories,
    judge_paid,
    judge_rows,
    judge_totals,
)
from tests.failures.chaos.load import (
    BEHAVIOURS,
    KEYED_TENANT,
    PATIENCE_SECONDS,
    Load,
    record_response,
)
from tests.failures.chaos.machine import Standstill, watched_machine
from tests.failures.chaos.plants import Plant, arm
from tests.failures.chaos.proxy import ANNOUNCED
from tests.failures.chaos.recipes import UNSERVED, Recipe, first_recipes, stopped_recipes
from tests.failures.proofs.accounts import Accounts, open_accounts
from tests.failures.proofs.client import request
from tests.failures.proofs.ledger import Books, open_books
from tests.support.fake_worker import FakeWorker
from tests.support.postgres_server import PostgresServer
from tests.support.redis_cluster import RedisClusterServers
from tests.support.redis_server import BUNDLED, SYSTEM, RedisServer
from tests.support.stack import Stack

FAULT_EVERY_SECONDS = 3.0
SETTLE_SECONDS = 75.0
"""A lease of 30 s, a sweep, the waits for receipts, and an allowance for a busy machine."""
EXPIRY_SECONDS = 45.0
"""Time in which everything of requests in Redis has expired or been dropped."""
SAMPLE_SECONDS = 0.5
PRICES = {"prompt": 1_370_000, "cached": 410_000, "completion": 5_930_000}
"""Micro-dollars per million tokens. The costs of most requests are rounded."""
CREDIT = 10**12

MEMORY = "MiB of memory"
FILES = "open files"
ALLOWED_GROWTH = {MEMORY: 96.0, FILES: 24.0}
"""Connection pools that grew under load, and freed memory that Python keeps."""
ALLOWED_TASKS = 2.0
"""Tasks of one kind, one of which may have just begun."""
IDLE_METRICS = {
    "gateway": ("sluice_gateway_jobs_in_flight", "sluice_gateway_requests_in_progress"),
    "worker": ("sluice_worker_jobs_running", "sluice_worker_sequences_running"),
}
RESUMED = "sluice_gateway_resumed_jobs_total"
PREEMPTED = "sluice_worker_preempted_sequences_total"
BURST = 40
"""Requests of one tenant at once, more than the workers have room for."""
BURST_SECONDS = 2.0
"""After a burst, a worker preempts within this time or not at all."""
BURST_EVERY_SECONDS = 20.0


Disturb = Callable[[Load, FaultInjector], Awaitable[None]]
"""Disturbs a deployment under load, and returns when the load must end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run."""

    seed: int = 1
    seconds: float | None = 60.0
    """How long faults are injected; None: until each kind has happened once."""
    completions: int = 0
    """The load lasts at least until so many requests have been completed."""
    lines: int = 0
    """Lines of batches that run beside the load; the faults last at least until they have ended."""
    database: str = "sqlite"
    """`sqlite` or `postgresql`."""
    is_cluster: bool = False
    """Whether Redis is a cluster of three masters with a replica each."""
    size: Size = field(default_factory=Size)
    clocked: tuple[str, ...] = CLOCKED
    """Roles whose last process has a clock that can be set, and therefore starts slowly."""
    clients: int = 16
    every: float = FAULT_EVERY_SECONDS
    kinds: Collection[Kind] = tuple(Kind)
    """The faults to inject, as far as they are possible."""
    behaviours: Mapping[Behaviour, int] = field(default_factory=lambda: BEHAVIOURS)
    is_planted: bool = False
    """Whether every process has all defects, disarmed."""
    is_hasty: bool = False
    """Whether reservations and leases expire soon."""
    recipes: tuple[str, ...] = ()
    """Names of the recipes to use, including their variants with stop strings; none: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One load on a deployment, with its disturbance, unless the options draw one."""

    disturb: Disturb
    plants: Collection[Plant] = ()
    """The armed defects."""
    recipes: tuple[str, ...] = ()
    """The recipes of this round; none: all of the deployment's."""
    behaviours: Mapping[Behaviour, int] | None = None
    """Of its clients, unless they are the deployment's."""
    lines: int = 0
    patience: float = PATIENCE_SECONDS
    """Timeout of clients."""
    settle_seconds: float = SETTLE_SECONDS


@dataclass(slots=True)
class Report:
    """The results of a run."""

    options: Options
    began: float
    histories: list[History]
    injector: FaultInjector
    violations: list[Violation]
    figures: Figures
    lines: list[History] = field(default_factory=list)
    """The lines of batches."""

    def text(self, *, most_of_a_kind: int = 3) -> str:
        """Return the seed, the faults, and some violations of each kind with their histories."""
        lines = [
            f"seed {self.options.seed}, {self.options.database}, {len(self.violations)} violations"
        ]
        lines += [f"  {fault.reported(self.began)}" for fault in self.injector.log]
        counts = Counter(violation.invariant for violation in self.violations)
        lines += [f"{count} x {invariant}" for invariant, count in counts.most_common()]
        shown = Counter[tuple[str, str]]()
        for violation in self.violations:
            kind = (violation.invariant, violation.what[:30])
            shown[kind] += 1
            if shown[kind] > most_of_a_kind:
                continue
            lines.append(f"\n{violation.invariant.upper()}: {violation.what}")
            if violation.history is not None:
                lines.append(violation.history.reported(self.began))
        return "\n".join(lines)

    def slowest(self, most: int = 3) -> str:
        """Return the histories with the longest pauses."""
        histories = sorted(self.histories, key=lambda history: -history.longest_gap)[:most]
        return "\n".join(
            f"Paused {history.longest_gap:.1f} s from "
            f"{history.longest_gap_began - self.began:.1f} s on: " + history.reported(self.began)
            for history in histories
        )


async def run(options: Options, *, say: Callable[[str], None] = lambda _: None) -> Report:
    """Do a whole run."""
    async with running(options, say=say) as run:
        return await run.go()


@asynccontextmanager
async def running(
    options: Options, *, say: Callable[[str], None] = lambda _: None
) -> AsyncIterator["Run"]:
    """Start everything for the length of a block, and record the correct responses."""
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder, ExitStack() as exits:
        redis, cluster = exits.enter_context(_redis()), None
        if options.is_cluster:
            cluster = exits.enter_context(_cluster())
        async with _database(options.database, Path(folder)) as (postgres, url):
            await schema.upgrade(url)
            stack = Stack(Path(folder), cluster or redis, {"SLUICE_DATABASE_URL": url})
            async with (
                deployed(
                    stack,
                    redis,
                    cluster=cluster,
                    size=options.size,
                    clocked=options.clocked,
                    postgres=postgres,
                    is_planted=options.is_planted,
                    is_hasty=options.is_hasty,
                ) as deployment,
                open_books(stack) as books,
            ):
                say("Everything runs; sending each request once without disturbance ...")
                try:
                    with watched_machine(stack.directory) as standstills:
                        run = Run(options, deployment, books, standstills, say)
                        await run.prepare()
                        yield run
                finally:
                    keep_logs(stack)


@asynccontextmanager
async def _database(kind: str, folder: Path) -> AsyncIterator[tuple[PostgresServer | None, str]]:
    """Run a database for the length of a block; yield its server, if it has one, and its URL."""
    if kind == "sqlite":
        yield None, f"sqlite+aiosqlite:///{folder}/sluice.db"
        return
    # Its event loops need another thread than this one's.
    server = await asyncio.to_thread(PostgresServer)
    try:
        yield server, await asyncio.to_thread(server.create_database)
    finally:
        await asyncio.to_thread(server.close)


@contextmanager
def _redis() -> Iterator[RedisServer]:
    server = RedisServer(SYSTEM or BUNDLED, append="always")
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def _cluster() -> Iterator[RedisClusterServers]:
    """Run a cluster whose servers reach each other when processes do not reach them."""
    assert SYSTEM is not None, "a cluster needs redis-server 7 (Debian's redis-server package)"
    cluster = RedisClusterServers(masters=MASTERS, announced=ANNOUNCED, append="always")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def keep_logs(stack: Stack) -> None:
    """Copy the logs of processes to the folder in CHAOS_LOGS."""
    if target := os.environ.get("CHAOS_LOGS"):
        Path(target).mkdir(parents=True, exist_ok=True)
        for log in stack.directory.glob("*.log"):
            (Path(target) / log.name).write_bytes(log.read_bytes())


class Run:
    """The steps of a run, which may have several rounds."""

    def __init__(
        self,
        options: Options,
        deployment: Deployment,
        books: Books,
        standstills: Sequence[Standstill],
        say: Callable[[str], None],
    ) -> None:
        self.deployment = deployment
        self.books = books
        self._options = options
        self._standstills = standstills
        self._say = say
        self._resumed: dict[tuple[str, int], float] = {}
        self._preempted: dict[tuple[str, int], float] = {}
        self._keys: dict[str, str] = {}
        self._recipes: list[Recipe] = []
        self._batches = Batches([], {}, [], 0)
        self._known: set[str] = set()
        """Rows from before the round."""

    async def prepare(self) -> None:
        """Make accounts, record the correct responses, and open the connections that any load
        opens.

        These connections then do not count as growth.
        """
        async with open_accounts(self.deployment.stack) as accounts:
            self._keys = await _open_accounts(accounts)
        gone = FakeWorker(self.books.redis, UNSERVED, name="unserved")
        await gone.announce(WorkerState.DRAINING, ttl_ms=1_000)
        names = self._options.recipes
        self._recipes = await _known_recipes(self.deployment, self._keys["free"], names)
        urls = self.deployment.gateway_urls
        behaviours = {Behaviour.STREAM: 1}
        load = Load(urls, self._keys, self._recipes[:1], random.Random(0), behaviours=behaviours)
        loading = asyncio.create_task(load.run(self._options.clients))
        await asyncio.sleep(0.5)
        load.is_over = True
        await loading

    async def go(self, round_: Round | None = None) -> Report:
        """Use the deployment while it is disturbed, let it settle, and check the invariants."""
        options, deployment = self._options, self.deployment
        round_ = round_ or Round(disturb=self._faults)
        before = await self._held()
        self._known = {row["request_id"] for row in await self.books.rows()}
        arm(deployment.armed_file, round_.plants)
        injector = FaultInjector(deployment)
        recipes = [
            each for each in self._recipes if not round_.recipes or each.name in round_.recipes
        ]
        load = Load(
            deployment.gateway_urls,
            self._keys,
            recipes,
            random.Random(options.seed),
            behaviours=round_.behaviours or options.behaviours,
            patience=round_.patience,
        )
        urls, lines = list(deployment.gateway_urls.values()), options.lines or round_.lines
        self._batches = batches = Batches(urls, self._keys, recipes, lines)
        began = time.monotonic()
        async with self._sampling(load):
            loading = asyncio.create_task(load.run(options.clients))
            running = asyncio.create_task(batches.run())
            await round_.disturb(load, injector)
            await running
            seconds = time.monotonic() - began
            load.is_over = True
            self._say("No more faults; waiting for the last requests ...")
            await loading
            await injector.over()
        self._say("Waiting until everything has settled ...")
        histories = load.histories + batches.histories
        violations = judge_histories(histories, injector.log, self._standstills)
        violations += judge_behaviours(histories) + batches.violations
        violations += await self._settle(histories, injector, before, round_.settle_seconds)
        violations += [Violation("processes", what) for what in deployment.unexpected_ends]
        deployment.unexpected_ends.clear()
        arm(deployment.armed_file, ())
        figures = Figures(options.seed, seconds, options.database)
        figures.skipped = {str(kind): why for kind, why in injector.skipped.items()}
        figures.violations = len(violations)
        figures.standstill_seconds = sum(each.ended - each.began for each in self._standstills)
        figures.lines, figures.batches = len(batches.histories), batches.ended
        figures.preempted_sequences = round(sum(self._preempted.values()))
        figures_of(figures, load.histories, injector.log, resumed_jobs=sum(self._resumed.values()))
        return Report(
            options, began, load.histories, injector, violations, figures, batches.histories
        )

    async def _faults(self, load: Load, injector: FaultInjector) -> None:
        """Inject the faults that the seed draws."""
        options = self._options
        kinds = [kind for kind in injector.kinds() if kind in options.kinds]
        self._say(f"{options.clients} clients, a fault each {options.every:g} s ...")
        await asyncio.sleep(1)
        if options.seconds is None:
            await self._kill_preempting(load, injector)
            await injector.run_all(each_once(options.seed, kinds), every=options.every)
        else:
            until = time.monotonic() + options.seconds

            def is_over() -> bool:
                return time.monotonic() > until and self._batches.is_over

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._bursts(load, injector, is_over))
                await injector.run(
                    schedule(options.seed, kinds), every=options.every, is_over=is_over
                )
        # The number and behaviours of requests meanwhile depend on the machine.
        while completed(load.histories) < options.completions or (
            completed_behaviours(load.histories) < options.behaviours.keys()
        ):
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _bursts(
        self, load: Load, injector: FaultInjector, is_over: Callable[[], bool]
    ) -> None:
        """Kill a worker while it preempts, again and again."""
        while not is_over():
            await self._kill_preempting(load, injector)
            await asyncio.sleep(BURST_EVERY_SECONDS)

    async def _kill_preempting(self, load: Load, injector: FaultInjector) -> None:
        """Let one tenant send more requests than there is room for, and kill the first worker that
        preempts: batch jobs, or this tenant's for those of the other clients.
        """
        workers = self.deployment.named("worker")
        while True:
            before = {each.name: await self.metric(each, PREEMPTED) for each in workers}
            load.burst(BURST)
            deadline = time.monotonic() + BURST_SECONDS
            while time.monotonic() < deadline:
                for worker in workers:
                    if worker.is_busy or not worker.was_ready:
                        continue
                    if await self.metric(worker, PREEMPTED) > before[worker.name]:
                        await injector.kill(worker, Kind.KILL_PREEMPTING)
                        return

    async def _settle(
        self,
        histories: list[History],
        injector: FaultInjector,
        before: Mapping[str, Mapping[str, float]],
        seconds: float,
    ) -> list[Violation]:
        """Wait until nothing is pending, then check the leftovers and the ledger."""
        found = []
        try:
            await self.books.settled(seconds=seconds)
        except TimeoutError as error:
            found.append(Violation("nothing left over", f"not settled: {str(error)[:500]}"))
        deadline = time.monotonic() + min(EXPIRY_SECONDS, seconds)
        while (left := await self._left(before)) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        found += left
        rows = await self.books.rows()
        new = [row for row in rows if row["request_id"] not in self._known]
        found += judge_rows(histories, rows, injector.log) + self._batches.judge_rows(new)
        keyed = [each for each in histories if each.tenant == KEYED_TENANT]
        found += judge_paid(keyed, [row for row in new if row["tenant_id"] == KEYED_TENANT])
        for tenant, key in self._keys.items():
            spent = sum(row["cost_micros"] for row in rows if row["tenant_id"] == tenant)
            deadline = time.monotonic() + min(EXPIRY_SECONDS, seconds)
            while (wrong := judge_totals(tenant, await self._spent(tenant, key, spent))) and (
                time.monotonic() < deadline
            ):
                await asyncio.sleep(0.5)
            found += wrong
        return found

    async def _spent(self, tenant: str, key: str, ledger: int) -> dict[str, int]:
        """Return what a tenant has spent by its ledger, usage report, invoice and credit."""
        url = next(iter(self.deployment.gateway_urls.values()))
        usage = (await request(url, key, path="/v1/usage?bucket=total")).json
        credits_ = (await request(url, key, path="/v1/limits")).json["credits"]
        month = f"{utc_now():%Y-%m}"
        statement = await InvoiceService(self.books.database).statement(tenant, month)
        spent = {
            "ledger": ledger,
            "usage": sum(each["cost_micros"] for each in usage["data"]),
            "invoice": statement.total_micros,
        }
        if tenant == KEYED_TENANT:
            spent["credit"] = CREDIT - credits_["remaining_micros"]
        limits = (await request(url, key, path="/v1/spend_limits")).json["data"]
        spent |= {f"limit of the {each['scope']}": each["used_micros"] for each in limits}
        return spent

    async def _left(self, before: Mapping[str, Mapping[str, float]]) -> list[Violation]:
        """Return what is left over in Redis and in the processes."""
        found = [
            Violation("nothing left over", each)
            for each in await self.books.leftovers()
            if not each.startswith("receipt: ")  # It expires anyway.
        ]
        found += [Violation("nothing left over", each) for each in await self._without_expiry()]
        for name, held in (await self._held()).items():
            allowed = dict.fromkeys(held, ALLOWED_TASKS) | ALLOWED_GROWTH
            found += judge_growth(name, before[name], held, allowed)
        for member in self.deployment.members.values():
            for metric in IDLE_METRICS.get(member.role, ()):
                if value := await self.metric(member, metric):
                    found.append(
                        Violation("nothing left over", f"{member.name}: {metric} is {value:g}")
                    )
        return found

    async def _without_expiry(self) -> list[str]:
        """Return keys of responses and of dead gateways that have no expiry."""
        redis, found = self.books.redis, []
        living = await self.books.living_gateways()
        for text in await self.books.keys("{[rg]:*"):
            owner = text[len("{g:") : text.index("}")]
            if text.startswith("{g:") and owner in living:
                continue
            if await redis.pttl(text) == -1:
                found.append(f"{text} has no expiry")
        return found

    async def _held(self) -> dict[str, dict[str, float]]:
        """Return what each process holds: memory, open files, tasks."""
        members = self.deployment.members
        held = await asyncio.gather(*(self._held_by(member) for member in members.values()))
        return dict(zip(members, held, strict=True))

    async def _held_by(self, member: Member) -> dict[str, float]:
        held = {MEMORY: _memory_mib(member.pid), FILES: float(_open_files(member.pid))}
        if member.url:
            with suppress(TimeoutError):
                held |= await self.deployment.tasks_of(member)
        return held

    async def metric(self, member: Member, name: str) -> float:
        """Return the sum of a metric; 0 if the process does not respond."""
        try:
            return await self.deployment.metric(member, name)
        except (OSError, HTTPException):
            # It was killed meanwhile, perhaps during its response.
            return 0.0

    @asynccontextmanager
    async def _sampling(self, load: Load) -> AsyncIterator[None]:
        """Read counters regularly, because a killed process loses them."""
        sampled = {"gateway": (RESUMED, self._resumed), "worker": (PREEMPTED, self._preempted)}

        async def sample() -> None:
            last_report = time.monotonic()
            while True:
                for member in self.deployment.members.values():
                    if member.role in sampled and member.was_ready and not member.is_busy:
                        metric, values = sampled[member.role]
                        if value := await self.metric(member, metric):
                            values[member.name, member.starts] = value
                await asyncio.sleep(SAMPLE_SECONDS)
                if time.monotonic() - last_report > 30:
                    last_report = time.monotonic()
                    lines = self._batches.histories
                    wrong = sum(bool(history.errors) for history in load.histories + lines)
                    what = f"{len(load.histories)} requests and {len(lines)} lines"
                    self._say(f"{what} so far, {wrong} with errors")

        task = asyncio.create_task(sample())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _open_accounts(accounts: Accounts) -> dict[str, str]:
    """Make tenants without limits, with limits that are never reached, and prepaid.

    The limits of "limited" count all that it spends, those of spending too.

    Return their keys.
    """
    await accounts.price(**PRICES)
    limits = {
        "requests_per_minute": 1_000_000,
        "tokens_per_day": 10**9,
        "concurrent_requests": 1_000,
        "budget_micros": 10**9,
    }
    await accounts.tenant("free")
    await accounts.tenant("limited", limits=limits)
    await accounts.tenant("prepaid", billing=Billing.PREPAID)
    await accounts.grant("prepaid", CREDIT)
    made = {
        tenant: await accounts.key(tenant, limits=limits if tenant == "limited" else None)
        for tenant in ("free", "limited", "prepaid")
    }
    for scope in (SpendScope.TENANT, SpendScope.KEY):
        await accounts.limit_spending(made["limited"], scope, MAX_LIMIT)
    return {tenant: key.text for tenant, key in made.items()}


async def _known_recipes(deployment: Deployment, key: str, names: Collection[str]) -> list[Recipe]:
    """Return recipes with their responses."""
    urls = list(deployment.gateway_urls.values())
    first = [each for each in first_recipes() if not names or each.name in names]
    await _answer_all(urls[0], key, first)
    for recipe in first:
        recipe.check_reached()
    stopped = stopped_recipes(first)
    await _answer_all(urls[-1], key, stopped)
    for recipe in stopped:
        reasons = [choice.stop_reason for choice in recipe.expected[False].choices.values()]
        assert recipe.body["stop"][0] in reasons, f"{recipe.name}: {recipe.body['stop']}"
    return first + stopped


async def _answer_all(url: str, key: str, recipes: list[Recipe]) -> None:
    ways = [(recipe, stream) for recipe in recipes for stream in {False, recipe.may_stream}]
    await asyncio.gather(*(record_response(url, key, recipe, stream=way) for recipe, way in ways))
    for recipe, stream in ways:
        assert not recipe.expected[stream].difference(recipe.expected[False]), recipe.name


def _memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def completed(histories: list[History]) -> int:
    """Return how many requests were completed."""
    return sum(history.ending is Ending.COMPLETE for history in histories)
