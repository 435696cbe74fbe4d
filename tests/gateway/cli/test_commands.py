"""The commands that manage the database, tenants and keys."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import Result

from gateway.auth.authenticator import Authenticator
from gateway.cli.main import main
from gateway.cli.terminal import table_lines
from gateway.platform.database.engine import Database
from gateway.platform.settings import load_settings
from gateway.records.errors import AuthenticationError
from gateway.records.principal import Principal
from tests.support.cases import case
from tests.support.processes import free_port

Sluice = Callable[..., Result]


def _principal_of(key: str) -> Principal:
    async def authenticate() -> Principal:
        database = Database(load_settings().database_url.get_secret_value())
        authenticator = Authenticator(database, verifier=None, ttl_seconds=1, max_entries=1)
        try:
            return await authenticator.authenticate(f"Bearer {key}")
        finally:
            await database.aclose()

    return asyncio.run(authenticate())


def _key(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_help_has_examples(sluice: Sluice) -> None:
    for command in ("", "up", "gateway", "tenants", "projects", "members", "keys", "db"):
        with case(command):
            result = sluice(*filter(None, [command]), "--help")
            assert result.exit_code == 0
            assert result.output.startswith(f"Usage: sluice {command}")
            assert re.search(r"Examples:\n +sluice ", result.output)


COMMANDS = {
    "tenants": ("create", "set", "list", "show", "suspend", "activate"),
    "projects": ("create", "set", "list", "archive", "activate"),
    "members": ("add", "set", "list", "remove"),
    "keys": ("create", "set", "list", "show", "rotate", "revoke"),
    "db": ("upgrade", "status"),
}
"""Commands by group."""


def test_help_describes_every_command(sluice: Sluice) -> None:
    for group, command in ((group, each) for group, of in COMMANDS.items() for each in of):
        with case(f"{group} {command}"):
            result = sluice(group, command, "--help")
            assert result.exit_code == 0
            usage, description, *_ = result.output.split("\n\n")
            assert usage.startswith(f"Usage: sluice {group} {command} ")
            assert re.search(r"^  [A-Z].{15,}\.$", description, re.DOTALL)


def test_database_is_refused_until_it_is_upgraded(sluice: Sluice, tmp_path: Path) -> None:
    assert sluice("db", "status").exit_code == 1
    assert json.loads(sluice("db", "status", "--json").stdout) == {"schema": "empty"}
    for command in (("tenants", "list"), ("keys", "list", "--tenant", "a"), ("gateway",)):
        result = sluice(*command)
        assert result.exit_code == 1
        assert result.stderr == (
            f"Error: The SQLite file {tmp_path}/data/sluice.db: its schema is empty. "
            "Run `sluice db upgrade` first.\n"
        )
    assert sluice("db", "upgrade").stdout == "The schema is current.\n"
    assert sluice("db", "upgrade").exit_code == 0
    assert sluice("db", "status").exit_code == 0
    assert json.loads(sluice("db", "status", "--json").stdout) == {"schema": "current"}
    assert sluice("tenants", "list").stdout == "None.\n"


@pytest.mark.usefixtures("empty_upgraded")
def test_tenant_is_created_listed_suspended_and_activated(sluice: Sluice) -> None:
    created = sluice("tenants", "create", "Acme Inc.", "--id", "acme", "--weight", "2.5", "--json")
    tenant = json.loads(created.stdout)
    assert {**tenant, "created_at": None} == {
        "object": "tenant",
        "id": "acme",
        "name": "Acme Inc.",
        "weight": 2.5,
        "status": "active",
        "dialect": None,
        "strict_parameters": False,
        "default_model": None,
        "plan_id": None,
        "limits": {},
        "billing": "postpaid",
        "service_tier": "default",
        "shows_cost": False,
        "zero_retention": False,
        "cors_origins": [],
        "stripe_customer_id": None,
        "time_zone": "UTC",
        "anomaly_factor": None,
        "anomaly_repeats": None,
        "anomaly_action": "stop",
        "created_at": None,
    }
    assert tenant["created_at"].endswith("Z")
    heading, row = sluice("tenants", "list").stdout.splitlines()
    assert heading.split() == [
        *("ID", "NAME", "WEIGHT", "STATUS", "DIALECT", "STRICT", "DEFAULT", "MODEL"),
        *("PLAN", "LIMITS", "BILLING", "TIER", "CREATED"),
    ]
    assert row.startswith("acme  Acme Inc.  2.5     active  -        no      -  ")
    assert row.endswith(" UTC")
    assert "suspended" in sluice("tenants", "suspend", "acme").stdout
    assert json.loads(sluice("tenants", "list", "--json").stdout)[0]["status"] == "suspended"
    assert "active" in sluice("tenants", "activate", "acme").stdout
    assert json.loads(sluice("tenants", "list", "--json").stdout) == [tenant]


@pytest.mark.usefixtures("upgraded")
def test_key_is_shown_once_and_works(sluice: Sluice) -> None:
    created = sluice("keys", "create", "--tenant", "acme", "--name", "web site")
    key = _key(created)
    assert "cannot be shown again" in created.stderr
    assert key not in created.stderr
    assert _principal_of(key).tenant_id == "acme"
    table = sluice("keys", "list", "--tenant", "acme").stdout
    as_json = sluice("keys", "list", "--tenant", "acme", "--json").stdout
    assert key[16:] not in table + as_json
    assert key[3:15] in table
    assert "web site" in table
    assert "digest" not in as_json


@pytest.mark.usefixtures("upgraded")
def test_key_gets_scopes_models_and_an_end(sluice: Sluice) -> None:
    options = ["--scope", "admin", "--model", "m1", "--model", "m2", "--expires-in", "30d"]
    created = json.loads(
        sluice("keys", "create", "--tenant", "acme", "--name", "x", *options, "--json").stdout
    )
    principal = _principal_of(created["key"])
    assert principal.scopes == {"admin"}
    assert principal.allowed_models == frozenset({"m1", "m2"})
    [listed] = json.loads(sluice("keys", "list", "--tenant", "acme", "--json").stdout)
    assert listed == {name: value for name, value in created.items() if name != "key"}
    assert listed["expires_at"] > listed["created_at"]
    assert listed["allowed_models"] == ["m1", "m2"]


@pytest.mark.usefixtures("empty_upgraded")
def test_tenant_options_are_set_changed_one_by_one_and_removed(sluice: Sluice) -> None:
    def options(*arguments: str) -> tuple[str | None, bool, str | None]:
        result = sluice("tenants", *arguments, "--json")
        assert result.exit_code == 0, result.output
        tenant = json.loads(result.stdout)
        assert json.loads(sluice("tenants", "list", "--json").stdout) == [tenant]
        return tenant["dialect"], tenant["strict_parameters"], tenant["default_model"]

    given = ("--dialect", "omlx", "--strict", "--default-model", "m1")
    assert options("create", "Acme", "--id", "acme", *given) == ("omlx", True, "m1")
    assert options("set", "acme", "--dialect", "llamacpp") == ("llamacpp", True, "m1")
    row = sluice("tenants", "list").stdout.splitlines()[1]
    assert row.split()[:7] == ["acme", "Acme", "1", "active", "llamacpp", "yes", "m1"]
    assert options("set", "acme", "--no-strict") == ("llamacpp", False, "m1")
    assert options("set", "acme", "--default-model", "m2") == ("llamacpp", False, "m2")
    taken = ("--dialect", "none", "--default-model", "none")
    assert options("set", "acme", *taken) == (None, False, None)


@pytest.mark.usefixtures("upgraded")
@pytest.mark.parametrize(
    "by",
    [
        # Revocation, which is tested with each name of a key, finds keys with the same code.
        pytest.param("id", marks=pytest.mark.long),
        pytest.param("prefix", marks=pytest.mark.long),
        "key",
    ],
)
def test_dialect_of_a_key_is_changed_by_id_prefix_or_key(sluice: Sluice, by: str) -> None:
    made = sluice(
        *("keys", "create", "--tenant", "acme", "--name", "x", "--dialect", "vllm", "--json")
    )
    created = json.loads(made.stdout)
    assert created["dialect"] == "vllm"
    assert _principal_of(created["key"]).dialect == "vllm"
    sluice("tenants", "set", "acme", "--dialect", "llamacpp", "--strict", "--default-model", "m1")
    change = ("keys", "set", "--tenant", "acme", created[by], "--dialect")
    changed = sluice(*change, "fireworks")
    assert changed.stdout.splitlines()[1].split()[:6] == [
        *(created["id"], created["prefix"], "x", "completions", "all", "fireworks")
    ]
    assert created["key"][16:] not in changed.output
    assert _principal_of(created["key"]).dialect == "fireworks"
    assert json.loads(sluice(*change, "none", "--json").stdout)["dialect"] is None
    principal = _principal_of(created["key"])
    assert (principal.dialect, principal.is_strict, principal.default_model) == (
        *("llamacpp", True, "m1"),
    )


@pytest.mark.usefixtures("upgraded")
def test_key_is_revoked_by_id_prefix_or_key(sluice: Sluice) -> None:
    for by in ("id", "prefix", "key"):
        with case(by):
            created = json.loads(
                sluice("keys", "create", "--tenant", "acme", "--name", "x", "--json").stdout
            )
            revoked = sluice("keys", "revoke", "--tenant", "acme", created[by])
            assert revoked.exit_code == 0
            assert created["key"][16:] not in revoked.output
            with pytest.raises(AuthenticationError, match="revoked"):
                _principal_of(created["key"])


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("tenants", "suspend", "nobody"), 'There is no tenant "nobody".'),
    (("tenants", "create", "X", "--id", "acme"), 'The tenant "acme" already exists.'),
    (("tenants", "set", "nobody", "--strict"), 'There is no tenant "nobody".'),
    (("tenants", "set", "acme", "--default-model", ""), "at least 1 character"),
    (("keys", "create", "--tenant", "nobody", "--name", "x"), 'There is no tenant "nobody".'),
    (
        ("keys", "set", "--tenant", "acme", "key_1", "--dialect", "vllm"),
        'The tenant "acme" has no key "key_1".',
    ),
    (("keys", "set", "--tenant", "acme", "key_1"), "Nothing to change"),
    (("keys", "revoke", "--tenant", "acme", "key_1"), 'The tenant "acme" has no key "key_1".'),
    (("tenants", "list", "--database-url", "mysql://u:hidden@h/d"), "must have the form"),
    (
        ("gateway", "--port", "99999"),
        "SLUICE_PORT: Input should be less than or equal to 65535",
    ),
    (
        ("gateway", "--processes", "65"),
        "SLUICE_PROCESSES: Input should be less than or equal to 64",
    ),
    (("gateway", "--redis-url", "http://u:hidden@h"), "SLUICE_REDIS_URL: "),
    (("gateway",), "SLUICE_CACHE_SALT_SECRET is not set. Set it to the same random text"),
]
"""Impossible commands, and their errors."""


@pytest.mark.usefixtures("upgraded")
def test_expected_error_is_one_sentence_and_exit_code_1(sluice: Sluice) -> None:
    for arguments, message in REFUSED:
        with case(arguments):
            result = sluice(*arguments)
            assert result.exit_code == 1
            assert result.stdout == ""
            [line] = result.stderr.splitlines()
            assert line.startswith("Error: ")
            assert message in line
            assert "hidden" not in line


INVALID: list[tuple[tuple[str, ...], str]] = [
    (
        ("tenants", "create", "X", "--weight", "0"),
        "'weight': Input should be greater than or equal to 0.001",
    ),
    (("tenants", "set", "acme"), "Nothing to change: specify at least one option."),
    (
        ("keys", "create", "--tenant", "acme", "--name", "x", "--limit", "rpm=5"),
        "'limits' has no member",
    ),
    (
        ("keys", "rotate", "--tenant", "acme", "key_1", "--grace", "31d"),
        "less than or equal to 2592000",
    ),
    (
        ("projects", "create", "--tenant", "acme", ""),
        "'name': String should have at least 1 character",
    ),
    (
        ("members", "add", "--tenant", "acme", "", "--role", "owner"),
        "'subject': String should have at least 1 character",
    ),
    (("plans", "create", "a", "--key-limit", "rpm=5"), "'key_limits' has no member"),
    (
        ("prices", "add", "", "--prompt", "1", "--completion", "1"),
        "'model': String should have at least 1 character",
    ),
    (("credits", "adjust", "--tenant", "acme", "5", "--note", ""), "'note' must not be empty"),
    (("webhooks", "create", "--tenant", "acme", "ftp://x"), "'url' must be an absolute URL"),
    (("usage", "show", "--group-by", "color"), "'group_by' must name any of"),
    (("usage", "export", "--tenant", "acme", "--month", "13"), "'month' must be a month"),
]
"""Commands with an invalid option, and their errors."""


def test_invalid_option_needs_no_database(sluice: Sluice) -> None:
    nowhere = ("--database-url", f"postgresql+asyncpg://127.0.0.1:{free_port()}/d")
    for arguments, message in INVALID:
        with case(arguments):
            result = sluice(*arguments, *nowhere)
            assert result.exit_code == 1
            assert message in result.stderr


WRONG = [
    ("nonsense",),
    ("keys", "create", "--name", "x"),
    ("keys", "create", "--tenant", "a", "--name", "x", "--scope", "root"),
    ("keys", "create", "--tenant", "a", "--name", "x", "--expires-in", "soon"),
    ("keys", "create", "--tenant", "a", "--name", "x", "--expires-in", "0d"),
    ("tenants", "set", "acme", "--dialect", "klingon"),
    ("tenants", "create", "Acme", "--dialect", "none"),
    ("keys", "create", "--tenant", "a", "--name", "x", "--dialect", "klingon"),
    ("up", "--port", "0"),
    ("up", "--engine", "other"),
]


def test_wrong_usage_is_exit_code_2(sluice: Sluice) -> None:
    for arguments in WRONG:
        with case(arguments):
            result = sluice(*arguments)
            assert result.exit_code == 2
            assert "Usage: " in result.stderr


@pytest.mark.usefixtures("upgraded")
def test_unannounced_revocation_is_saved_and_reported(sluice: Sluice) -> None:
    created = json.loads(
        sluice("keys", "create", "--tenant", "acme", "--name", "x", "--json").stdout
    )
    nowhere = f"redis://127.0.0.1:{free_port()}"
    result = sluice("keys", "revoke", "--tenant", "acme", created["id"], "--redis-url", nowhere)
    assert result.exit_code == 1
    assert "connection refused. The change is saved, but gateways apply it only" in result.stderr
    with pytest.raises(AuthenticationError):
        _principal_of(created["key"])
    assert sluice("keys", "revoke", "--tenant", "acme", created["id"]).exit_code == 0


def test_worker_gets_its_arguments_and_is_not_taken_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "__main__.py").write_text("print('not ours')")
    result = subprocess.run(
        [sys.executable, "-P", "-m", "gateway.cli.main", "worker", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "--model-path" in result.stdout
    assert "--redis-url" in result.stdout
    assert "not ours" not in result.stdout


def _tenant_arguments(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _tenant_arguments(found, f"{path} {name}".strip())
    for param in command.params:
        if "tenant" in (param.name or ""):
            yield path, param.opts[0]


def test_a_tenant_is_named_by_the_same_option_everywhere() -> None:
    # Only the commands about tenants themselves name one as their object.
    found = dict(_tenant_arguments(main, ""))
    own = {path for path, name in found.items() if name == "tenant"}
    assert own == {f"tenants {verb}" for verb in ("set", "show", "suspend", "activate")}
    others = {path for path, name in found.items() if name == "--tenant"}
    assert {"batches show", "credits grant", "webhooks list", "keys create"} < others


def test_names_are_completed() -> None:
    def complete(*given: str, start: str) -> list[str]:
        shell = ShellComplete(main, {}, "sluice", "_SLUICE_COMPLETE")
        return [item.value for item in shell.get_completions(list(given), start)]

    assert complete(start="pr") == ["projects", "prices", "prompt-log"]
    assert complete("keys", start="r") == ["revoke", "rotate"]
    assert complete("keys", "create", start="--ten") == ["--tenant"]


TABLE = (
    ("ID", "NAME", "DIALECT", "SCOPES"),
    [("key_1", "web site of Acme", "-", "completions,usage"), ("key_2", "x", "-", "usage")],
)


def test_tables_fit_the_terminal() -> None:
    whole = list(table_lines(*TABLE, None))
    assert whole == list(table_lines(*TABLE, len(whole[1])))
    assert list(table_lines(*TABLE, 42)) == [
        "ID     NAME              SCOPES",
        "key_1  web site of Acme  completions,usage",
        "key_2  x                 usage",
    ]
    assert list(table_lines(*TABLE, 29)) == [
        "ID     NAME      SCOPES",
        "key_1  web site  completions,",
        "       of Acme   usage",
        "key_2  x         usage",
    ]
    assert list(table_lines(*TABLE, 20)) == [
        *("ID      key_1", "NAME    web site of Acme", "SCOPES  completions,usage", ""),
        *("ID      key_2", "NAME    x", "SCOPES  usage"),
    ]


def test_client_of_a_gateway_and_worker_need_no_database_package() -> None:
    program = (
        "import sys\n"
        "from gateway.cli.main import main\n"
        "import gateway.cli.worker\n"
        "from gateway.cli import records, resources\n"
        "packages = {'sqlalchemy', 'alembic', 'fastapi', 'worker', 'jwt', 'redis'}\n"
        "print(packages & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"
