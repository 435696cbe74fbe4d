"""Metrics of Redis and the database in a process: times, failures, certificates."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from contract.scripts import CommandExecutor, LuaScript
from gateway.platform import store_telemetry
from gateway.platform.database.engine import Database, operation_of
from gateway.platform.redis_client import MeasuredConnection, connect
from tests.support.cases import all_cases
from tests.support.certificates import self_signed
from tests.support.processes import free_port
from tests.support.redis_server import SYSTEM, Encryption, RedisServer, running_redis

SECONDS = "sluice_redis_command_duration_seconds_count"
ERRORS = "sluice_redis_errors_total"


def reported(name: str, **labels: str) -> float:
    """Return the sum of the series of this process that have these labels; 0 if there is none."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


class Growth:
    """Growth of series of this process."""

    def __init__(self) -> None:
        self._before = [
            (sample.name, sample.labels, sample.value)
            for family in REGISTRY.collect()
            for sample in family.samples
        ]

    def of(self, name: str, **labels: str) -> float:
        return reported(name, **labels) - sum(
            value
            for each, its_labels, value in self._before
            if each == name and labels.items() <= its_labels.items()
        )


@pytest.fixture
def growth() -> Growth:
    return Growth()


@pytest.fixture
async def measured(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """A client as gateways and background jobs use it."""
    async with connect(redis_server.url, max_connections=4) as client:
        yield client


async def test_commands_are_timed_by_name_and_blocking_ones_are_not(
    measured: Redis, growth: Growth
) -> None:
    await measured.set("a", 1)
    await measured.get("a")
    await measured.xread({"nothing": "$"}, block=10)
    async with measured.pipeline(transaction=True) as pipeline:
        for key in ("a", "b"):
            pipeline.execute_command("GET", key)
        assert await pipeline.execute() == [b"1", None]
    assert (growth.of(SECONDS, command="set"), growth.of(SECONDS, command="get")) == (1, 1)
    assert growth.of(SECONDS, command="pipeline") == 1
    assert growth.of(SECONDS, command="xread") == 0
    assert growth.of("sluice_redis_command_duration_seconds_sum", command="set") > 0


async def test_commands_that_share_a_round_trip_are_timed_one_by_one(
    measured: Redis, growth: Growth
) -> None:
    executor = MeasuredConnection(measured)
    await executor.execute_command("SET", "a", 1)
    script = LuaScript("model_status")
    await measured.script_flush()
    names = ("workers", "waiting", "leases", "active", "arrivals", "batch_waiting", "job_prefix")
    named = {name: f"{{m}}:{name}" for name in names}
    # Once because the script is unknown, which is no failure.
    for _ in range(2):
        assert await script.run(executor, **named) == [0, 0, 0, 0, 0, 0]
    assert growth.of(SECONDS, command="set") == 1
    assert growth.of(SECONDS, command="model_status") == 1
    assert growth.of(SECONDS, command="eval") == 1
    assert growth.of(SECONDS, command="pipeline") == 0
    assert growth.of(ERRORS, command="model_status") == 0


async def test_failures_are_counted_by_the_command_that_failed(
    measured: Redis, growth: Growth
) -> None:
    executor = MeasuredConnection(measured)
    await measured.set("a", "text")
    clients: tuple[CommandExecutor, ...] = (measured, executor)
    for client in clients:
        with pytest.raises(ResponseError):
            await client.execute_command("INCR", "a")
    pipeline = measured.pipeline(transaction=False)
    pipeline.execute_command("INCR", "a")
    with pytest.raises(ResponseError):
        await pipeline.execute()
    assert growth.of(ERRORS, command="incr") == 2
    assert growth.of(ERRORS, command="pipeline") == 1
    assert growth.of(SECONDS, command="incr") == 0
    with running_redis() as server:
        async with connect(server.url, max_connections=1) as client:
            await client.ping()
            server.stop()
            with pytest.raises(RedisError):
                await client.ping()
    assert growth.of(ERRORS, command="ping") == 1


@pytest.fixture
def encrypted_redis(tmp_path: Path) -> Iterator[str]:
    """URL of a server that speaks TLS only."""
    if SYSTEM is None:
        pytest.skip("redis-server of the system (Debian's redis-server package) is not installed")
    self_signed("localhost", tmp_path)
    encryption = Encryption(free_port(), tmp_path / "server.pem")
    server = RedisServer(SYSTEM, options=encryption.options)
    try:
        server.start()
        yield encryption.url
    finally:
        server.close()


async def test_certificate_expiry_of_redis_is_reported(encrypted_redis: str) -> None:
    async with connect(encrypted_redis, max_connections=1) as client:
        assert await MeasuredConnection(client).execute_command("PING")
    assert_an_hour(reported("sluice_certificate_expiry_timestamp_seconds", peer="redis"))


async def test_unverified_certificate_of_redis_is_reported(
    encrypted_redis: str,
) -> None:
    url, _, _ = encrypted_redis.partition("?")
    store_telemetry._CERTIFICATE_EXPIRY.clear()
    async with connect(f"{url}?ssl_cert_reqs=none", max_connections=1) as client:
        assert await client.ping()
    assert_an_hour(reported("sluice_certificate_expiry_timestamp_seconds", peer="redis"))


@pytest.fixture
async def encrypted_postgres(postgres_sockets: str, tmp_path: Path) -> AsyncIterator[str]:
    """URL of a TLS proxy for PostgreSQL: the tests' server is built without TLS."""
    serving, _ = self_signed("localhost", tmp_path)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)  # PostgreSQL's request to begin TLS.
        writer.write(b"S")
        await writer.start_tls(serving)
        upstream = await asyncio.open_unix_connection(f"{postgres_sockets}/.s.PGSQL.5432")
        await asyncio.gather(copy(reader, upstream[1]), copy(upstream[0], writer))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(65536):
            writer.write(content)
        writer.close()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield f"postgresql+asyncpg://postgres@127.0.0.1:{port}/postgres?ssl=require"
    server.close()
    await server.wait_closed()


async def test_certificate_expiry_of_the_database_is_reported(
    encrypted_postgres: str,
) -> None:
    database = Database(encrypted_postgres)
    async with database.reading() as transaction:
        assert await transaction.scalar(text("SELECT 1")) == 1
    await database.aclose()
    assert_an_hour(reported("sluice_certificate_expiry_timestamp_seconds", peer="database"))


def assert_an_hour(timestamp: float) -> None:
    """Check the expiry of a certificate of `self_signed`."""
    left = datetime.fromtimestamp(timestamp, UTC) - datetime.now(UTC)
    assert timedelta(minutes=55) < left <= timedelta(hours=1)


async def test_statements_are_timed_by_their_kind_and_failures_counted(
    database: Database, growth: Growth
) -> None:
    seconds = "sluice_sql_statement_duration_seconds_count"
    async with database.reading() as transaction:
        await transaction.execute(text("SELECT 1"))
        await transaction.execute(text("WITH one AS (SELECT 1) SELECT * FROM one"))
    assert growth.of(seconds, operation="select") == 1
    assert growth.of(seconds, operation="other") >= 1
    with pytest.raises(DBAPIError):
        async with database.engine.connect() as connection:
            await connection.execute(text("SELECT nothing FROM nowhere"))
    assert growth.of("sluice_sql_errors_total", operation="select") == 1
    async with database.writing() as transaction:
        await transaction.execute(text("DELETE FROM tenants WHERE id = 'nobody'"))
    assert growth.of(seconds, operation="delete") == 1


@all_cases(
    ("statement", "operation"),
    [
        ("SELECT 1", "select"),
        ("\n  insert into t values (1)", "insert"),
        ("UPDATE t SET a = 1", "update"),
        ("DELETE FROM t", "delete"),
        ("BEGIN IMMEDIATE", "other"),
        ("", "other"),
    ],
)
def test_a_statement_has_one_of_few_kinds(statement: str, operation: str) -> None:
    assert operation_of(statement) == operation
