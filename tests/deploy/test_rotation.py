"""Passwords of Redis and PostgreSQL change as in docs/operations.md, with no refused client."""

import re
import shlex
from collections.abc import Iterator

import asyncpg
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from tests.deploy.test_operations import PAGE
from tests.support.redis_server import RedisServer, running_redis

OLD, NEW = "old-password", "new-password"


def shown(program: str) -> list[list[str]]:
    """Return the words of each command of a program in the page's section on secrets."""
    section = PAGE.partition("## Rotate secrets")[2].partition("\n## ")[0].replace("\\\n", " ")
    lines = re.findall(rf"^docker compose exec \w+ {program} (.+)$", section, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture
def redis_of_its_own() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def test_redis_accepts_both_passwords_until_the_old_one_is_removed(
    redis_of_its_own: RedisServer,
) -> None:
    port = redis_of_its_own.port
    with Redis(port=port) as client:
        client.execute_command("ACL", "SETUSER", "gateway", "on", f">{OLD}", "+ping")

    def works(password: str) -> bool:
        # A wrong password counts as a lost connection, after which a client would wait and retry.
        retry = Retry(NoBackoff(), 0)
        with Redis(port=port, username="gateway", password=password, retry=retry) as client:
            try:
                return bool(client.ping())
            except AuthenticationError:
                return False

    expected = [(True, True), (False, True)]
    assert (works(OLD), works(NEW)) == (True, False)
    with Redis(port=port) as operator:
        commands = shown("redis-cli")
        assert len(commands) == len(expected)
        for words, after in zip(commands, expected, strict=True):
            operator.execute_command(
                *(word.replace("$NEW", NEW).replace("$OLD", OLD) for word in words)
            )
            assert (works(OLD), works(NEW)) == after


async def test_second_role_of_postgresql_replaces_the_first(
    postgres_sockets: str,
) -> None:
    await _as("postgres", postgres_sockets, "CREATE ROLE sluice SUPERUSER LOGIN")
    await _as("postgres", postgres_sockets, "CREATE DATABASE rotated OWNER sluice")
    try:
        for words in shown("psql"):
            user = words[words.index("--username") + 1]
            given = [words[at + 1] for at, word in enumerate(words) if word == "--command"]
            # psql's own commands prompt at the terminal.
            statements = [statement for statement in given if not statement.startswith("\\")]
            await _as(user, postgres_sockets, *statements, database="rotated")
        made = "CREATE TABLE made (id integer)"
        assert await _as("sluice_b", postgres_sockets, made, database="rotated") == "sluice"
        with pytest.raises(asyncpg.InvalidAuthorizationSpecificationError):
            await _as("sluice", postgres_sockets, database="rotated")
    finally:
        await _as("postgres", postgres_sockets, "DROP DATABASE rotated")
        await _as("postgres", postgres_sockets, "DROP ROLE sluice_b", "DROP ROLE sluice")


async def _as(user: str, sockets: str, *statements: str, database: str = "postgres") -> str:
    """Run statements as a user, and return the current user."""
    connection = await asyncpg.connect(user=user, database=database, host=sockets)
    try:
        for statement in statements:
            await connection.execute(statement)
        return str(await connection.fetchval("SELECT current_user"))
    finally:
        await connection.close()
