"""URLs of managed services, TLS, poolers in transaction mode, and several hosts."""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import func, make_url, select, text

from gateway.platform.database import schema
from gateway.platform.database.engine import Database, describe, parse_url, tls_of
from gateway.platform.database.postgresql_url import connect_arguments
from gateway.platform.database.tables import TenantRow
from gateway.records.errors import InvalidParameterError, StoreUnavailableError
from gateway.records.records import TenantStatus
from gateway.records.times import utc_now
from tests.support.cases import all_cases
from tests.support.certificates import self_signed
from tests.support.pgbouncer import Pooler, running_pgbouncer
from tests.support.postgres_server import PostgresServer, running_postgres
from tests.support.processes import free_port

GATEWAYS = 8
"""More than the pooler has connections to the server."""
TURNS = 10


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def pooler(server: PostgresServer) -> Iterator[Pooler]:
    with running_pgbouncer(server.sockets) as pooler:
        yield pooler


def _through(pooler: Pooler, url: str) -> str:
    """Return the URL of a database behind the pooler, as a managed service gives it."""
    return (
        f"postgres://postgres:any@localhost:{pooler.port}{urlsplit(url).path}?sslmode=verify-full"
        f"&sslrootcert={pooler.authority}&channel_binding=require&connect_timeout=4"
        "&application_name=ours"
    )


async def _ask(url: str, statement: str) -> object:
    database = Database(url)
    try:
        async with database.reading() as transaction:
            return await transaction.scalar(text(statement))
    finally:
        await database.aclose()


def test_pooler_in_transaction_mode_serves_more_gateways_than_it_has_connections(
    server: PostgresServer, pooler: Pooler
) -> None:
    url = _through(pooler, server.create_database())

    async def use(number: int, database: Database) -> None:
        for turn in range(TURNS):
            row = TenantRow(
                id=f"t-{number}-{turn}",
                name="T",
                weight=1.0,
                status=TenantStatus.ACTIVE,
                cors_origins=("x",),
                created_at=utc_now(),
            )
            async with database.writing() as transaction:
                transaction.add(row)
            async with database.snapshot() as transaction:
                found = await transaction.get_one(TenantRow, row.id)
                assert found.cors_origins == ("x",)

    async def use_all() -> int | None:
        await schema.upgrade(url)
        databases = [Database(url) for _ in range(GATEWAYS)]
        try:
            await asyncio.gather(*(use(*each) for each in enumerate(databases)))
            async with databases[0].reading() as transaction:
                connection = await (await transaction.connection()).get_raw_connection()
                assert tls_of(connection.driver_connection) is not None
                name = await transaction.scalar(text("SELECT current_setting('application_name')"))
                assert name == "ours"
                return await transaction.scalar(select(func.count()).select_from(TenantRow))
        finally:
            for database in databases:
                await database.aclose()

    assert asyncio.run(use_all()) == GATEWAYS * TURNS


async def test_another_authority_or_name_is_refused(pooler: Pooler, tmp_path: Path) -> None:
    self_signed("localhost", tmp_path)
    other = tmp_path / "server.pem"
    for host, authority in (("localhost", other), ("127.0.0.1", pooler.authority)):
        url = f"postgresql://postgres@{host}:{pooler.port}/postgres?sslmode=verify-full"
        with pytest.raises(StoreUnavailableError, match="TLS failed"):
            await _ask(f"{url}&sslrootcert={authority}", "SELECT 1")


def test_the_primary_of_several_hosts_is_found_again_after_a_failover(
    server: PostgresServer,
) -> None:
    with running_postgres() as other:
        hosts = f"/no/such/folder,{server.sockets},{other.sockets}"
        url = f"postgresql://postgres@/postgres?host={hosts}&target_session_attrs=read-write"
        for primary, replica in ((server, other), (other, server), (server, other)):
            for each, value in ((primary, "off"), (replica, "on")):
                setting = f"ALTER SYSTEM SET default_transaction_read_only = {value}"
                each.execute(setting, "SELECT pg_reload_conf()")
            folders = "SELECT current_setting('unix_socket_directories')"
            assert asyncio.run(_ask(url, folders)) == primary.sockets


@all_cases(
    ("url", "hosts", "parameters"),
    [
        ("postgresql://u:p@h/d", "h:5432", {}),
        ("postgres://u:p@a:1,b/d", "a:1, b:5432", {}),
        ("postgresql://u@/d?host=a,b&port=1,2", "a:1, b:2", {}),
        ("postgresql://u@/d?host=a,b&port=7", "a:7, b:7", {}),
        ("postgresql://u@/d?host=/run/pg&port=7", "/run/pg:7", {}),
        ("postgresql://u@h/d?port=7", "h:7", {}),
        ("postgresql://u@h/d?pgbouncer=true&prepared_statement_cache_size=0", "h:5432", {}),
        ("postgresql+asyncpg://u@h/d?ssl=require", "h:5432", {"sslmode": ["require"]}),
        (
            "postgresql://u@ep-1.example/d?options=endpoint%3Dep-1&application_name=a%20b",
            "ep-1.example:5432",
            {"options": ["endpoint=ep-1"], "application_name": ["a b"]},
        ),
    ],
)
def test_parameters_of_a_url_reach_the_driver(
    url: str, hosts: str, parameters: dict[str, list[str]]
) -> None:
    plain, arguments = connect_arguments(parse_url(url), most_seconds=5)
    assert describe(plain) == f"PostgreSQL at {hosts}"
    assert plain.drivername == "postgresql+asyncpg"
    defaults = {"application_name": ["sluice"]}
    assert parse_qs(urlsplit(arguments["dsn"]).query) == {**defaults, **parameters}


def test_public_authorities_are_known_by_name() -> None:
    url = parse_url("postgresql://u@h/d?sslmode=verify-full&sslrootcert=system")
    trust = connect_arguments(url, most_seconds=5)[1]["ssl"]
    assert (trust.check_hostname, trust.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert trust.cert_store_stats()["x509_ca"]


@all_cases(("given", "seconds"), [("2", 2), ("30", 5), ("0", 5)])
def test_connect_timeout_shortens_the_wait(given: str, seconds: float) -> None:
    url = parse_url(f"postgresql://u@h/d?connect_timeout={given}")
    assert connect_arguments(url, most_seconds=5)[1]["timeout"] == seconds


@all_cases("query", ["", "sslmode=require&", "sslmode=verify-ca&"])
def test_binding_of_channels_is_replaced_by_verification(query: str) -> None:
    """As the URLs of Neon ask for it: the public authorities prove the server's identity."""
    url = make_url(f"postgresql://u@h/d?{query}channel_binding=require")
    arguments = connect_arguments(url, most_seconds=5)[1]
    assert arguments["ssl"].check_hostname is True
    assert arguments["ssl"].verify_mode is ssl.CERT_REQUIRED
    assert parse_qs(urlsplit(arguments["dsn"]).query)["sslmode"] == ["verify-full"]


@all_cases(
    ("query", "message"),
    [
        ("ssl=true", 'ssl of the database URL must be one of disable, allow, prefer, .*"true".'),
        ("sslmode=on", 'sslmode of the database URL must be one of .* Given: "on".'),
        ("sslrootcert=/no/ca.pem", r"sslrootcert .*: the file /no/ca.pem cannot be read \(No such"),
        ("sslcert=/etc/hostname", r"sslcert .*: the file /etc/hostname cannot be read \(no PEM"),
        ("channel_binding=on", "channel_binding .* must be one of disable, prefer, require"),
        ("channel_binding=require&sslmode=prefer", "sslmode .* must be require or verify-full"),
        ("connect_timeout=soon", 'connect_timeout .* must be a number of seconds. Given: "soon".'),
        ("host=a,b&port=1,x", 'port .* must be a number. Given: "1,x".'),
        ("host=a,b&port=1,2,3", "port .* must be one number, or one for each of 2 hosts."),
    ],
)
def test_wrong_parameter_is_named_in_one_line(query: str, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message) as caught:
        Database(f"postgresql://u:hidden@h/d?{query}")
    assert caught.value.param == "database_url"
    assert "\n" not in caught.value.message
    assert "hidden" not in caught.value.message


async def test_parameter_that_only_the_server_refuses_is_named(server: PostgresServer) -> None:
    url = f"postgresql://postgres@/postgres?host={server.sockets}&keepalives_idel=1"
    with pytest.raises(StoreUnavailableError, match='parameter "keepalives_idel"'):
        await _ask(url, "SELECT 1")
    nowhere = f"postgresql://u@127.0.0.1:{free_port()}/d?sslmode=verify-full"
    with pytest.raises(StoreUnavailableError, match="root certificate file"):
        await _ask(nowhere, "SELECT 1")
