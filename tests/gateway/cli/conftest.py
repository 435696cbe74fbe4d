"""Fixtures of the command line's tests: a separate folder, a real Redis, a SQLite file."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import main
from tests.support.redis_server import RedisServer

REPOSITORY = Path(__file__).parents[3]

Sluice = Callable[..., Result]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer) -> None:
    monkeypatch.chdir(tmp_path)
    # Programs that are started in another folder find the code there, installed or not.
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("SLUICE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("SLUICE_DATABASE_URL", f"sqlite+aiosqlite:///{tmp_path}/data/sluice.db")


@pytest.fixture
def sluice() -> Sluice:
    """Run `sluice` with some arguments in this process."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments)

    return run


@pytest.fixture(scope="session")
def database_of_acme(
    tmp_path_factory: pytest.TempPathFactory,
    copy_sqlite: Callable[[Path], str],
    redis_server: RedisServer,
) -> Path:
    """A SQLite file with the current schema and the tenant `acme`."""
    file = tmp_path_factory.mktemp("acme") / "sluice.db"
    settings = {"SLUICE_DATABASE_URL": copy_sqlite(file), "SLUICE_REDIS_URL": redis_server.url}
    created = CliRunner(env=settings).invoke(main, ("tenants", "create", "Acme", "--id", "acme"))
    assert created.exit_code == 0, created.output
    return file


@pytest.fixture
def empty_upgraded(tmp_path: Path, copy_sqlite: Callable[[Path], str]) -> None:
    """A database with the current schema and nothing else."""
    copy_sqlite(tmp_path / "data" / "sluice.db")


@pytest.fixture
def upgraded(tmp_path: Path, database_of_acme: Path) -> None:
    """A database with the current schema and the tenant `acme`."""
    (tmp_path / "data").mkdir(mode=0o700)
    shutil.copyfile(database_of_acme, tmp_path / "data" / "sluice.db")
