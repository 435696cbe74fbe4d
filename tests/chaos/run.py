"""One run: start everything, use it while it is broken, let it settle, and look at what is left."""

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
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from gateway.database import schema
from gateway.tenancy.records import Billing
from tests.chaos.deployment import CLOCKED, Deployment, Member, Size, deployed
from tests.chaos.faults import Havoc, each_once, schedule
from tests.chaos.figures import Figures, figures_of
from tests.chaos.judge import (
    Violation,
    completed_manners,
    judge_growth,
    judge_manners,
    judge_rows,
    judge_stories,
)
from tests.chaos.load import MANNERS, PATIENCE_SECONDS, Load, answer_once
from tests.chaos.machine import Standstill, watched_machine
from tests.chaos.plants import Plant, arm
from tests.chaos.recipes import Recipe, first_recipes, stopped_recipes
from tests.chaos.story import Ending, Manner, Story
from tests.proofs.ledger import Books, open_books
from tests.proofs.office import Office, open_office
from tests.support.postgres_server import PostgresServer
from tests.support.redis_server import BUNDLED, SYSTEM, RedisServer
from tests.support.stack import Stack

FAULT_EVERY_SECONDS = 3.0
SETTLE_SECONDS = 75.0
"""A lease of 30 s, a sweep, the patience of those who wait for receipts, and what a busy machine needs."""
EXPIRY_SECONDS = 45.0
"""In which everything in Redis that is left of requests has expired or been dropped."""
SAMPLE_SECONDS = 0.5
PRICE = 2_000_000
CREDIT = 10**12

MEMORY = "MiB of memory"
FILES = "open files"
ALLOWED_GROWTH = {MEMORY: 96.0, FILES: 24.0}
"""Pools of connections that grew with the load, and what Python keeps of freed memory."""
ALLOWED_TASKS = 2.0
"""Tasks of one kind, one of which may have begun just now."""
IDLE_METRICS = {
    "gateway": ("sluice_gateway_jobs_in_flight", "sluice_gateway_requests_in_progress"),
    "worker": ("sluice_worker_jobs_running", "sluice_worker_sequences_running"),
}
RESUMED = "sluice_gateway_resumed_jobs_total"


Disturb = Callable[[Load, Havoc], Awaitable[None]]
"""Does something to a deployment that is used, and returns when it may be used no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is to be."""

    seed: int = 1
    seconds: float | None = 60.0
    """How long faults are injected; None: until each kind has happened once."""
    completions: int = 0
    """Requests that are answered in full before the load ends, however soon the faults are over."""
    database: str = "sqlite"
    """`sqlite` or `postgresql`."""
    size: Size = field(default_factory=Size)
    clocked: tuple[str, ...] = CLOCKED
    """Roles whose last process has a clock that can be set, and therefore starts slowly."""
    clients: int = 16
    every: float = FAULT_EVERY_SECONDS
    manners: Mapping[Manner, int] = field(default_factory=lambda: MANNERS)
    is_planted: bool = False
    """Whether every process has all defects, for those who arm them."""
    is_hasty: bool = False
    """Whether reservations and leases expire soon."""
    recipes: tuple[str, ...] = ()
    """Names of the recipes that are used, also with their stop strings; none: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One load on a deployment, and what is done to it meanwhile, where the options do not draw that."""

    disturb: Disturb
    plants: Collection[Plant] = ()
    """The defects that show meanwhile."""
    recipes: tuple[str, ...] = ()
    """Those of the deployment's that are used; none: all."""
    patience: float = PATIENCE_SECONDS
    """Of clients."""
    settle_seconds: float = SETTLE_SECONDS


@dataclass(slots=True)
class Report:
    """All that is known after a run."""

    options: Options
    began: float
    stories: list[Story]
    havoc: Havoc
    violations: list[Violation]
    figures: Figures

    def text(self, *, most_of_a_kind: int = 3) -> str:
        """Return the seed, the faults, and some violations of each kind with their stories."""
        lines = [
            f"seed {self.options.seed}, {self.options.database}, {len(self.violations)} violations"
        ]
        lines += [f"  {fault.reported(self.began)}" for fault in self.havoc.log]
        counts = Counter(violation.invariant for violation in self.violations)
        lines += [f"{count} x {invariant}" for invariant, count in counts.most_common()]
        shown = Counter[tuple[str, str]]()
        for violation in self.violations:
            kind = (violation.invariant, violation.what[:30])
            shown[kind] += 1
            if shown[kind] > most_of_a_kind:
                continue
            lines.append(f"\n{violation.invariant.upper()}: {violation.what}")
            if violation.story is not None:
                lines.append(violation.story.reported(self.began))
        return "\n".join(lines)

    def slowest(self, most: int = 3) -> str:
        """Return the stories with the longest pauses."""
        stories = sorted(self.stories, key=lambda story: -story.longest_gap)[:most]
        return "\n".join(
            f"Paused {story.longest_gap:.1f} s from {story.longest_gap_began - self.began:.1f} s on: "
            + story.reported(self.began)
            for story in stories
        )


async def run(options: Options, *, say: Callable[[str], None] = lambda _: None) -> Report:
    """Do a whole run."""
    async with running(options, say=say) as run:
        return await run.go()


@asynccontextmanager
async def running(
    options: Options, *, say: Callable[[str], None] = lambda _: None
) -> AsyncIterator["Run"]:
    """Start everything for the length of a block, and learn the right answers."""
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder, _redis() as redis:
        async with _database(options.database, Path(folder)) as (postgres, url):
            await schema.upgrade(url)
            stack = Stack(Path(folder), redis, {"SLUICE_DATABASE_URL": url})
            async with (
                deployed(
                    stack,
                    redis,
                    size=options.size,
                    clocked=options.clocked,
                    postgres=postgres,
                    is_planted=options.is_planted,
                    is_hasty=options.is_hasty,
                ) as deployment,
                open_books(stack) as books,
            ):
                say("Everything runs; asking each request once without disturbance ...")
                try:
                    with watched_machine(stack.directory) as standstills:
                        run = Run(options, deployment, books, standstills, say)
                        await run.prepare()
                        yield run
                finally:
                    keep_logs(stack)


@asynccontextmanager
async def _database(kind: str, folder: Path) -> AsyncIterator[tuple[PostgresServer | None, str]]:
    """Run a database for the length of a block; give its server, if it has one, and its URL."""
    if kind == "sqlite":
        yield None, f"sqlite+aiosqlite:///{folder}/sluice.db"
        return
    # It runs event loops of its own, which must be in another thread than this one's.
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


def keep_logs(stack: Stack) -> None:
    """Copy what processes have printed to where CHAOS_LOGS says."""
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
        self._keys: dict[str, str] = {}
        self._recipes: list[Recipe] = []

    async def prepare(self) -> None:
        """Make accounts, learn the right answers, and open the connections that any load opens: they are no growth."""
        async with open_office(self.deployment.stack) as office:
            self._keys = await _open_accounts(office)
        names = self._options.recipes
        self._recipes = await _known_recipes(self.deployment, self._keys["free"], names)
        urls = self.deployment.gateway_urls
        manners = {Manner.STREAM: 1}
        load = Load(urls, self._keys, self._recipes[:1], random.Random(0), manners=manners)
        loading = asyncio.create_task(load.run(self._options.clients))
        await asyncio.sleep(0.5)
        load.is_over = True
        await loading

    async def go(self, round_: Round | None = None) -> Report:
        """Use the deployment while it is disturbed, let it settle, and judge what came of it."""
        options, deployment = self._options, self.deployment
        round_ = round_ or Round(disturb=self._faults)
        before = await self._held()
        arm(deployment.armed_file, round_.plants)
        havoc = Havoc(deployment)
        recipes = [
            each for each in self._recipes if not round_.recipes or each.name in round_.recipes
        ]
        load = Load(
            deployment.gateway_urls,
            self._keys,
            recipes,
            random.Random(options.seed),
            manners=options.manners,
            patience=round_.patience,
        )
        began = time.monotonic()
        async with self._sampling(load):
            loading = asyncio.create_task(load.run(options.clients))
            await round_.disturb(load, havoc)
            seconds = time.monotonic() - began
            load.is_over = True
            self._say("No more faults; the last requests end ...")
            await loading
            await havoc.over()
        self._say("Waiting until everything has settled ...")
        violations = judge_stories(load.stories, havoc.log, self._standstills)
        violations += judge_manners(load.stories)
        violations += await self._settle(load.stories, havoc, before, round_.settle_seconds)
        violations += [Violation("processes", what) for what in deployment.unexpected_ends]
        deployment.unexpected_ends.clear()
        arm(deployment.armed_file, ())
        figures = Figures(options.seed, seconds, options.database)
        figures.skipped = {str(kind): why for kind, why in havoc.skipped.items()}
        figures.violations = len(violations)
        figures.standstill_seconds = sum(each.ended - each.began for each in self._standstills)
        figures_of(figures, load.stories, havoc.log, resumed_jobs=sum(self._resumed.values()))
        return Report(options, began, load.stories, havoc, violations, figures)

    async def _faults(self, load: Load, havoc: Havoc) -> None:
        """Do the faults that the seed draws."""
        options, kinds = self._options, havoc.kinds()
        self._say(f"{options.clients} clients, a fault each {options.every:g} s ...")
        await asyncio.sleep(1)
        if options.seconds is None:
            await havoc.run_all(each_once(options.seed, kinds), every=options.every)
        else:
            until = time.monotonic() + options.seconds
            await havoc.run(schedule(options.seed, kinds), every=options.every, until=until)
        # How many requests there are meanwhile, and of which manners, depends on the machine.
        while completed(load.stories) < options.completions or (
            completed_manners(load.stories) < options.manners.keys()
        ):
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _settle(
        self,
        stories: list[Story],
        havoc: Havoc,
        before: Mapping[str, Mapping[str, float]],
        seconds: float,
    ) -> list[Violation]:
        """Wait until nothing is on its way, and look at what is left, and at the ledger."""
        found = []
        try:
            await self.books.settled(seconds=seconds)
        except TimeoutError as error:
            found.append(Violation("nothing left over", f"not settled: {str(error)[:500]}"))
        deadline = time.monotonic() + min(EXPIRY_SECONDS, seconds)
        while (left := await self._left(before)) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        found += left
        return found + judge_rows(stories, await self.books.rows(), havoc.log)

    async def _left(self, before: Mapping[str, Mapping[str, float]]) -> list[Violation]:
        """Return what is left over now in Redis and in the processes."""
        found = [
            Violation("nothing left over", each)
            for each in await self.books.leftovers()
            if not each.startswith("receipt: ")  # It expires by itself.
        ]
        found += [Violation("nothing left over", each) for each in await self._without_expiry()]
        for name, held in (await self._held()).items():
            allowed = dict.fromkeys(held, ALLOWED_TASKS) | ALLOWED_GROWTH
            found += judge_growth(name, before[name], held, allowed)
        for member in self.deployment.members.values():
            for metric in IDLE_METRICS.get(member.role, ()):
                if value := await self._metric(member, metric):
                    found.append(
                        Violation("nothing left over", f"{member.name}: {metric} is {value:g}")
                    )
        return found

    async def _without_expiry(self) -> list[str]:
        """Return keys of answers and of dead gateways that would stay for ever."""
        redis, found = self.books.redis, []
        living = await self.books.living_gateways()
        async for name in redis.scan_iter("{[rg]:*", count=1000):
            text = name.decode()
            owner = text[len("{g:") : text.index("}")]
            if text.startswith("{g:") and owner in living:
                continue
            if await redis.pttl(name) == -1:
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

    async def _metric(self, member: Member, name: str) -> float:
        try:
            return await self.deployment.metric(member, name)
        except (OSError, HTTPException):
            # It was killed meanwhile, perhaps in the middle of its answer.
            return 0.0

    @asynccontextmanager
    async def _sampling(self, load: Load) -> AsyncIterator[None]:
        """Read now and then what gateways count, since it is gone when they are killed."""

        async def sample() -> None:
            last_said = time.monotonic()
            while True:
                for member in self.deployment.named("gateway"):
                    if member.was_ready and not member.is_busy:
                        value = await self._metric(member, RESUMED)
                        if value:
                            self._resumed[member.name, member.starts] = value
                await asyncio.sleep(SAMPLE_SECONDS)
                if time.monotonic() - last_said > 30:
                    last_said = time.monotonic()
                    wrong = sum(bool(story.complaints) for story in load.stories)
                    self._say(f"{len(load.stories)} requests so far, {wrong} complaints")

        task = asyncio.create_task(sample())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _open_accounts(office: Office) -> dict[str, str]:
    """Make tenants without limits, with limits that nobody reaches, and prepaid; return their keys."""
    await office.price(prompt=PRICE, cached=PRICE, completion=PRICE)
    limits = {
        "requests_per_minute": 1_000_000,
        "tokens_per_day": 10**9,
        "concurrent_requests": 1_000,
        "budget_micros": 10**9,
    }
    await office.tenant("free")
    await office.tenant("limited", limits=limits)
    await office.tenant("prepaid", billing=Billing.PREPAID)
    await office.grant("prepaid", CREDIT)
    return {
        tenant: (await office.key(tenant, limits=limits if tenant == "limited" else None)).text
        for tenant in ("free", "limited", "prepaid")
    }


async def _known_recipes(deployment: Deployment, key: str, names: Collection[str]) -> list[Recipe]:
    """Return recipes with their answers."""
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
    await asyncio.gather(*(answer_once(url, key, recipe, stream=way) for recipe, way in ways))
    for recipe, stream in ways:
        assert not recipe.expected[stream].difference(recipe.expected[False]), recipe.name


def _memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def completed(stories: list[Story]) -> int:
    """Return how many requests were answered in full."""
    return sum(story.ending is Ending.COMPLETE for story in stories)
