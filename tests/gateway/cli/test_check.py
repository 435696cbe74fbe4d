"""`sluice check` finds what is wrong with a deployment, from the place of each process."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from click.testing import Result
from redis.asyncio import Redis

from contract import keys
from tests.support.cases import case
from tests.support.fake_worker import FakeWorker
from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.pgbouncer import running_pgbouncer
from tests.support.processes import free_port, spawn
from tests.support.redis_server import RedisServer
from tests.support.stack import CHECKPOINT

Sluice = Callable[..., Result]

SALT = "0123456789abcdef-"


@pytest.fixture(autouse=True)
def _salt(monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer) -> None:
    monkeypatch.setenv("SLUICE_CACHE_SALT_SECRET", SALT)
    redis_server.command("FLUSHALL")


def _lines(result: Result, state: str) -> list[str]:
    found = [line for line in result.stdout.splitlines() if line.startswith(state)]
    return [line.removeprefix(state).strip() for line in found]


@contextmanager
def _configured(server: RedisServer, name: str, value: str) -> Iterator[None]:
    with redis.Redis.from_url(server.url) as client:
        before = client.config_get(name)[name]
        client.config_set(name, value)
        try:
            yield
        finally:
            client.config_set(name, before)


@pytest.mark.usefixtures("upgraded")
def test_deployment_without_errors(sluice: Sluice, redis_server: RedisServer) -> None:
    with _configured(redis_server, "maxmemory", "4gb"):
        result = sluice("check")
    assert (result.exit_code, _lines(result, "ERROR")) == (0, []), result.output
    assert "secrets: of 0 gateways" in _lines(result, "WARNING")
    assert any(line.startswith("Redis latency: median ") for line in _lines(result, "OK"))
    found = json.loads(sluice("check", "--role", "jobs", "--json").stdout)
    assert {each["check"] for each in found} >= {"database schema", "webhooks", "export sinks"}
    assert all(each["remedy"] for each in found if each["state"] != "ok")
    beat = sluice("check", "--role", "beat")
    assert "database" not in beat.stdout
    assert "Redis eviction: noeviction" in _lines(beat, "OK")


@pytest.mark.usefixtures("upgraded")
def test_each_fault_is_an_error_with_a_remedy(
    sluice: Sluice, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = f"redis://u:hidden@127.0.0.1:{free_port()}"
    (tmp_path / "file").touch()
    jwt = {
        "SLUICE_JWT_ALGORITHMS": "RS256",
        "SLUICE_JWT_ISSUER": "https://a.example",
        "SLUICE_JWT_AUDIENCE": "b",
        "SLUICE_JWT_JWKS_URL": f"http://127.0.0.1:{free_port()}/jwks",
    }
    oidc = {"SLUICE_OIDC_ISSUER": f"http://127.0.0.1:{free_port()}", "SLUICE_OIDC_CLIENT_ID": "c"}
    cluster = {"SLUICE_CELERY_BROKER_URL": f"{redis_server.url}?cluster=true"}
    faults: list[tuple[dict[str, str], str, str]] = [
        ({"SLUICE_REDIS_URL": closed}, "gateway", "Redis: Redis at 127.0.0.1"),
        ({"SLUICE_CELERY_BROKER_URL": closed}, "beat", "broker: Redis at 127.0.0.1"),
        (cluster, "jobs", "broker: Celery cannot use a Redis Cluster."),
        ({"SLUICE_FILE_STORE": str(tmp_path / "file")}, "jobs", "file store: The file store"),
        (jwt, "gateway", "identity: The keys of the token's issuer cannot be read."),
        (oidc, "gateway", "identity: The identity provider does not respond as expected."),
        ({"SLUICE_DATABASE_URL": "sqlite+aiosqlite:///new.db"}, "jobs", "database schema: The"),
    ]
    for variables, role, wanted in faults:
        with case(wanted), monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            result = sluice("check", "--role", role)
            assert result.exit_code == 1, result.output
            assert any(line.startswith(wanted) for line in _lines(result, "ERROR")), result.output
            assert "hidden" not in result.output
    for name, value, wanted in (
        ("maxmemory-policy", "allkeys-lru", "Redis eviction: allkeys-lru"),
        ("maxmemory", "1mb", "Redis memory: "),
    ):
        with case(wanted), _configured(redis_server, name, value):
            result = sluice("check", "--role", "beat")
            [line] = _lines(result, "ERROR")
            assert line.startswith(wanted)
            assert "-> " in result.stdout


@pytest.mark.usefixtures("upgraded")
def test_secrets_of_gateways_prices_and_workers(
    sluice: Sluice, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.platform.settings import load_settings

    own = load_settings().fingerprints
    monkeypatch.setenv("SLUICE_ENCRYPTION_KEYS", "A" * 43 + "=")
    other = load_settings().fingerprints
    monkeypatch.delenv("SLUICE_ENCRYPTION_KEYS")
    assert SALT not in own

    def announce(**fingerprints: str) -> None:
        with redis.Redis.from_url(redis_server.url) as client:
            for name, value in fingerprints.items():
                client.zadd(keys.GATEWAYS, {name: int(time.time() * 1000)})
                client.set(keys.gateway_alive(name), value)

    announce(one=own, two=own)
    assert "secrets: of 2 gateways" in _lines(sluice("check"), "OK")
    announce(three=other)
    assert _lines(sluice("check"), "ERROR") == ["secrets: differ: SLUICE_ENCRYPTION_KEYS"]

    async def serve() -> None:
        async with Redis.from_url(redis_server.url) as client:
            await FakeWorker(client, "m").announce(last_failure="CUDA out of memory")

    asyncio.run(serve())
    warnings = _lines(sluice("check"), "WARNING")
    assert "prices: missing for m" in warnings
    assert any(line.endswith(": CUDA out of memory") for line in warnings)
    sluice("prices", "add", "m", "--prompt", "1", "--completion", "1")
    assert "prices: of 1 models" in _lines(sluice("check"), "OK")


def test_pooler_and_tls_of_the_database(sluice: Sluice, postgres_sockets: str) -> None:
    with running_pgbouncer(postgres_sockets) as pooler:
        url = f"postgresql://postgres@localhost:{pooler.port}/postgres?sslmode=verify-full"
        given = ("--database-url", f"{url}&sslrootcert={pooler.authority}")
        result = sluice("check", *given)
        assert {"database pooler: a pooler", "database TLS: verified"} <= {*_lines(result, "OK")}
        direct = f"postgresql://postgres@/postgres?host={postgres_sockets}"
        result = sluice("check", "--database-url", direct)
        assert "database pooler: none" in _lines(result, "OK")


def _checked_worker(url: str, log: Path, *options: str) -> tuple[int, str]:
    """Return the exit code and the output of the check of the tiny model's worker."""
    place = ("--role", "worker", "--redis-url", url, "--model-path", str(CHECKPOINT))
    with log.open("wb") as output:
        program = (sys.executable, "-P", "-m", "gateway.cli.main", "check", *place, *options)
        code = spawn(*program, stdout=output, stderr=output).wait(PROCESS_PATIENCE_SECONDS)
    return code, log.read_text()


def test_place_of_a_worker(redis_server: RedisServer, tmp_path: Path) -> None:
    options = ("--engine", "scripted", "--json")
    code, text = _checked_worker(redis_server.url, tmp_path / "log", *options)
    assert code == 0, text
    assert {each["check"] for each in json.loads(text)} >= {"Redis version", "Redis clock"}


@pytest.mark.slow
def test_engine_arguments_are_read_by_vllm(redis_server: RedisServer, tmp_path: Path) -> None:
    options = ("--engine-arguments", '{"max_num_seq": 1}')
    code, text = _checked_worker(redis_server.url, tmp_path / "log", *options)
    assert code == 1
    assert "ERROR    engine arguments: " in text
    assert "max_num_seq" in text
