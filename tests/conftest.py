"""Fixtures for every folder of tests."""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from itertools import count
from pathlib import Path

import asyncpg
import coverage
import hypothesis
import pytest
from redis.asyncio import Redis
from sqlalchemy import make_url
from typing_extensions import override
from xdist.remote import Producer

from common import tasks
from common.tasks import end_task
from gateway.platform import redis_client
from gateway.platform.database import schema
from gateway.platform.database.engine import Database
from tests.support.databases import create_sqlite, make_template, sqlite_url
from tests.support.deployment import attach, place, uses_deployment
from tests.support.kinds import DATABASE_PARAMETERS, REDIS_KINDS, REDIS_PARAMETERS
from tests.support.long_timeouts import wait_for_stores
from tests.support.preloaded import begin_run, prepare, prepare_tests
from tests.support.progress import Progress
from tests.support.redis_server import RedisServer, running_redis
from tests.support.scheduling import FileScheduling, rank_of
from tests.support.stack import Stack

_numbers = count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the tests."""
    parser.addoption(
        "--slow", action="store_true", help="also run the tests marked slow, as CI does"
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="also run the tests marked slow or long, and proofs, chaos and random tests at full "
        "size",
    )
    parser.addoption(
        "--contexts",
        action="store_true",
        help="write into .coverage/ which test executes which line "
        "(for tests.failures.mutants; twice as slow)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set variables that engines and hypothesis read at import."""
    if _runs_tests(config):
        gc.disable()  # Until the tests are collected, which saves a third of the time.
    # Let engines run on any core: vLLM binds all concurrent ones to the same cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # On CPUs, vLLM runs the model in the process of its engine core: one import of vLLM less.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # Each HTTP client reads the certificates of all authorities, which takes longer than most
    # tests. No test needs them.
    os.environ["SSL_CERT_FILE"] = str(config.rootpath / "tests/support/authority.pem")
    # The same examples in every default run; new ones in long runs, where each failure prints its
    # seed.
    hypothesis.settings.register_profile(
        "default-run", derandomize=True, deadline=None, max_examples=50
    )
    hypothesis.settings.register_profile("long-run", deadline=None, print_blob=True)
    is_long = config.getoption("--long")
    hypothesis.settings.load_profile("long-run" if is_long else "default-run")
    if not hasattr(config, "workerinput"):
        begin_run()
        if not _runs_tests(config):
            prepare_tests(config.args)
            if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
                # A whole run: vLLM is imported at the same time.
                prepare("engine")
        if not config.option.verbose:
            config.pluginmanager.register(Progress(config))


def _runs_tests(config: pytest.Config) -> bool:
    """Return whether this process runs tests itself, without processes of pytest-xdist."""
    return hasattr(config, "workerinput") or not config.getoption("numprocesses")


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let the processes of pytest-xdist be forks of one that has imported most of the code."""
    forked = f"popen//python={sys.executable} -m tests.support.preloaded python"
    config.option.tx = [forked if each == "popen" else each for each in config.option.tx]


class Folder(pytest.Package):
    """A folder of tests, whose "package" fixtures end with its last test, without `__init__.py`."""

    @override
    def setup(self) -> None:
        """Import nothing."""


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector:
    """Let fixtures end with their folder: an idle deployment takes 2 s of CPU time a minute."""
    return Folder.from_parent(parent, path=path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what only slow or long runs do, and run the longest tests first."""
    if not config.getoption("--long"):
        left_out = {"long"} if config.getoption("--slow") else {"long", "slow"}
        chosen = [
            item for item in items if left_out.isdisjoint(mark.name for mark in item.iter_markers())
        ]
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen
    items.sort(key=lambda item: rank_of(item.nodeid))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported and collected objects from garbage collection: they stay."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # As gateways and workers do: it saves a tenth of the CPU time.
    gc.set_threshold(50_000, 20, 20)
    config = session.config
    if config.getoption("--contexts") and _runs_tests(config):
        os.environ["COVERAGE_PROCESS_START"] = str(config.rootpath / "pyproject.toml")
        os.environ["COVERAGE_FILE"] = str(config.rootpath / ".coverage" / "data")
        coverage.process_startup(force=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Function) -> Generator[None, object, object]:
    """Wait for access to the shared deployment; name the test for coverage if enabled."""
    measured = coverage.Coverage.current() if item.config.getoption("--contexts") else None
    if measured is not None:
        measured.switch_context(f"{item.nodeid}|run")
    if not uses_deployment(item):
        return (yield)
    # Not in a fixture: the test's timeout would end the wait.
    with place(item.config, alone="alone" in item.fixturenames):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """Distribute the tests so that those which share servers run in one process."""
    return FileScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def timeouts_of_redis() -> dict[str, float]:
    """The product's timeouts. From now on, clients in this process wait without limit."""
    timeouts = {
        name: value
        for name, value in vars(redis_client).items()
        if name.endswith("_TIMEOUT_SECONDS")
    }
    wait_for_stores()
    return timeouts


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """Let what is left open fail the module that opened it, not a later one of its process."""
    yield
    gc.collect()
    gc.freeze()  # Or the next module's collection would look at all that is left again: 0.3 s.


@pytest.fixture
def frozen_redis_is_left(
    timeouts_of_redis: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let clients in this process abandon a frozen Redis as soon as the product does."""
    for name, seconds in timeouts_of_redis.items():
        monkeypatch.setattr(redis_client, name, seconds)


@pytest.fixture(scope="session")
def deployment(request: pytest.FixtureRequest) -> Stack:
    """Two gateways and the real engine, shared by the tests of all processes."""
    return attach(request.config)


@pytest.fixture
def alone() -> None:
    """For tests that observe the whole deployment: no other test uses it meanwhile."""


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis 6.2 for tests that do not depend on its version; empty at the start of each test."""
    with running_redis() as server:
        yield server


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator["Redis"]:
    """A client of an empty server."""
    async with _emptied(redis_server) as client:
        yield client


@pytest.fixture(scope="session")
def redis_of_kind() -> Iterator[Callable[[str], RedisServer]]:
    """Return the server of a kind; the first test that needs it starts it."""
    with ExitStack() as servers:

        @cache
        def start(kind: str) -> RedisServer:
            executable, cluster = REDIS_KINDS[kind]
            if executable is None:
                pytest.skip("redis-server of the system (Debian's redis-server) is not installed")
            return servers.enter_context(running_redis(executable, cluster=cluster))

        yield start


@pytest.fixture(params=REDIS_PARAMETERS)
def redis_kind(request: pytest.FixtureRequest) -> str:
    """The kind of Redis of `any_redis`: the usual one, or what `every_redis` sets."""
    return str(request.param)


@pytest.fixture
def any_redis_server(redis_kind: str, redis_of_kind: Callable[[str], RedisServer]) -> RedisServer:
    """A server of the kind."""
    return redis_of_kind(redis_kind)


@pytest.fixture
async def any_redis(any_redis_server: RedisServer) -> AsyncIterator["Redis"]:
    """A client of an empty server of the kind."""
    async with _emptied(any_redis_server) as client:
        yield client


@asynccontextmanager
async def _emptied(server: RedisServer) -> AsyncIterator["Redis"]:
    async with Redis.from_url(server.url) as client:
        await client.flushall()
        yield client
        # Or they would open connections again, which nothing closes.
        await end_task(*(asyncio.all_tasks() & tasks._background._tasks))


@pytest.fixture(scope="session")
def postgres_sockets() -> Iterator[str]:
    """Folder of the socket of a PostgreSQL server that runs for all tests."""
    from tests.support.postgres_server import running_postgres

    with running_postgres() as server:
        yield server.sockets


async def _execute(sockets: str, *statements: str) -> None:
    connection = await asyncpg.connect(user="postgres", database="postgres", host=sockets)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


@pytest.fixture(params=DATABASE_PARAMETERS)
def database_kind(request: pytest.FixtureRequest) -> str:
    """The kind of the databases below: the usual one, or what `every_database` sets."""
    return str(request.param)


@pytest.fixture
def empty_database_url(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if database_kind == "sqlite":
        return sqlite_url(tmp_path / "accounts" / "sluice.db")
    return _create_postgres_database(request.getfixturevalue("postgres_sockets"))


@pytest.fixture
def database_url(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database with only the current schema."""
    if database_kind == "sqlite":
        copy_sqlite: Callable[[Path], str] = request.getfixturevalue("copy_sqlite")
        return copy_sqlite(tmp_path / "accounts" / "sluice.db")
    sockets = request.getfixturevalue("postgres_sockets")
    template = request.getfixturevalue("postgres_template")
    return _create_postgres_database(sockets, template=template)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """A database with the current schema."""
    database = Database(database_url)
    yield database
    await database.aclose()


@pytest.fixture(scope="session")
def copy_sqlite() -> Callable[[Path], str]:
    """Make a SQLite database with the current schema at a path, and return its URL."""
    make_template()
    return create_sqlite


@pytest.fixture(scope="session")
def postgres_template(postgres_sockets: str) -> str:
    """Name of a PostgreSQL database with the current schema and without connections."""
    url = _create_postgres_database(postgres_sockets)
    asyncio.run(schema.upgrade(url))
    return str(make_url(url).database)


def _create_postgres_database(sockets: str, *, template: str = "template1") -> str:
    name = f"sluice_{next(_numbers)}"
    asyncio.run(_execute(sockets, f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"))
    return f"postgresql+asyncpg://postgres@/{name}?host={sockets}"
