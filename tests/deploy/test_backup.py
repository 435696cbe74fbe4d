"""The backup of docs/operations.md, made and restored on a real PostgreSQL."""

import asyncio
import json
import re
import shlex
import subprocess
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import main
from gateway.platform.database.engine import Database
from gateway.platform.database.partitions import make_partitions, months_from
from gateway.records.times import utc_now
from tests.deploy.test_operations import PAGE
from tests.support.ledger import use
from tests.support.postgres_server import PROGRAMS
from tests.support.redis_server import RedisServer


def shown(program: str) -> list[str]:
    """Return the page's command, without its `docker compose exec` and its redirection."""
    (line,) = re.findall(rf"docker compose exec -T postgres ({program} [^<>`]+)", PAGE)
    return shlex.split(line)


class Site:
    """An installation with a database and Redis, in which the page's commands run."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self._url = database_url
        self._redis_url = redis_url
        parts = urlsplit(database_url)
        self._name = parts.path.lstrip("/")
        self._sockets = parse_qs(parts.query)["host"][0]

    def postgres(self, program: str, *, given: bytes = b"") -> bytes:
        """Run a command of PostgreSQL as the page shows it; return its output."""
        command = shown(program)
        # The service's user and database are both named sluice.
        words = [self._name if word == "sluice" else word for word in command]
        words[words.index("--username") + 1] = "postgres"
        done = subprocess.run(
            [PROGRAMS / words[0], *words[1:], "--host", self._sockets],
            input=given,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout

    def sluice(self, *words: str) -> Result:
        """Run the command line."""
        settings = {"SLUICE_DATABASE_URL": self._url, "SLUICE_REDIS_URL": self._redis_url}
        return CliRunner(env=settings).invoke(main, words)

    def expect(self, *words: str) -> str:
        """Run the command line, which must succeed; return its output."""
        done = self.sluice(*words)
        assert done.exit_code == 0, done.output
        return done.stdout

    def usage(self) -> list[dict[str, object]]:
        """Return the usage up to now."""
        rows: list[dict[str, object]] = json.loads(self.expect("usage", "show", "--json"))
        for row in rows:
            del row["end"]
        return rows

    def execute(self, statement: str) -> int:
        """Run a statement as the superuser and return its row count."""
        return asyncio.run(self._execute(statement))

    async def _execute(self, statement: str) -> int:
        connection = await asyncpg.connect(user="postgres", database=self._name, host=self._sockets)
        try:
            return len(await connection.fetch(statement))
        finally:
            await connection.close()

    def spend(self, cost_micros: int) -> None:
        """Write a request into the ledger."""
        asyncio.run(self._spend(cost_micros))

    async def _spend(self, cost_micros: int) -> None:
        database = Database(self._url)
        async with database.writing() as transaction:
            await make_partitions(transaction, months_from(utc_now()))
        await use(database, "acme", cost_micros, is_prepaid=False)
        await database.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("database_kind", ["postgresql"], indirect=True)
def test_restored_backup_has_all_data(database_url: str, redis_server: RedisServer) -> None:
    site = Site(database_url, redis_server.url)
    site.expect("tenants", "create", "Acme", "--id", "acme")
    site.expect("keys", "create", "--tenant", "acme", "--name", "web")
    site.spend(250)
    before = [site.usage(), site.expect("keys", "list", "--tenant", "acme")]
    head = re.findall(r"head (\w+)", site.expect("audit", "verify"))[0]
    dump = site.postgres("pg_dump")

    # Later changes are gone after the restore, and what was lost is back.
    site.expect("tenants", "create", "Later", "--id", "later")
    site.spend(999)
    site.execute("DROP TABLE usage_ledger CASCADE")
    site.postgres("pg_restore", given=dump)

    assert "current" in site.expect("db", "upgrade") + site.expect("db", "status")
    site.expect("audit", "verify", "--expect", head)
    assert [site.usage(), site.expect("keys", "list", "--tenant", "acme")] == before
    assert site.sluice("tenants", "show", "later").exit_code == 1
    site.expect("usage", "reconcile")
    assert json.loads(site.expect("usage", "reconcile", "--json"))["is_clean"]

    # The database still refuses changes of ledger rows.
    with pytest.raises(asyncpg.PostgresError):
        site.execute("UPDATE usage_ledger SET cost_micros = 0")
    site.spend(100)
