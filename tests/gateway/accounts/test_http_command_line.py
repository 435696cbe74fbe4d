"""The command line as a client of a gateway: `sluice --url`, with and without a right to do it."""

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import main
from gateway.records.scopes import Scope
from tests.support.cases import case
from tests.support.stack import MODEL, Stack

Run = Callable[..., Result]


@pytest.fixture(scope="package")
def operator_key(stack: Stack) -> str:
    """A key with the scope admin."""
    return stack.key("operators", scopes=frozenset({Scope.ADMIN}))


@pytest.fixture
def by_url(stack: Stack, operator_key: str) -> Run:
    """Run `sluice` as on a laptop, which knows only the gateway's URL and an operator's key."""
    environment = {"SLUICE_ADMIN_URL": stack.operators, "SLUICE_ADMIN_KEY": operator_key}
    return lambda *arguments: CliRunner(env=environment).invoke(main, arguments)


@pytest.fixture
def direct(stack: Stack) -> Run:
    """Run `sluice` on the database and Redis of the gateway."""
    settings = ("SLUICE_DATABASE_URL", "SLUICE_REDIS_URL")
    environment = {name: stack.environment[name] for name in settings}
    return lambda *arguments: CliRunner(env=environment).invoke(main, arguments)


def _json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _error(result: Result) -> str:
    assert result.exit_code == 1, result.output
    [line] = result.stderr.splitlines()
    return line


def test_every_resource_is_managed_by_url(by_url: Run, direct: Run, stack: Stack) -> None:
    made = _json(by_url("tenants", "create", "Laptop", "--id", "laptop", "--json"))
    assert _json(direct("tenants", "show", "laptop", "--json")) == made
    own = ("--tenant", "laptop")
    limit = ("--limit", "requests_per_minute=600", "--limit", "tokens_per_day=none")
    changed = _json(by_url("tenants", "set", "laptop", *limit, "--default-model", MODEL, "--json"))
    assert changed["limits"] == {"requests_per_minute": 600, "tokens_per_day": None}
    assert "suspended" in by_url("tenants", "suspend", "laptop").stdout
    assert "active" in by_url("tenants", "activate", "laptop").stdout
    project = _json(by_url("projects", "create", *own, "p", "--json"))["id"]
    by_url("members", "add", *own, "https://id.example/1", "--role", "owner")
    by_url("members", "add", *own, "b", "--role", "owner")
    assert "viewer" in by_url("members", "set", *own, "b", "--role", "viewer").stdout
    removed = by_url("members", "remove", *own, "b")
    assert removed.stdout.endswith(" (b).\n"), removed.output
    # The subject contains slashes, which a URL must not take as its own.
    named = by_url("members", "set", *own, "https://id.example/1", "--role", "owner")
    assert named.exit_code == 0, named.output
    key = by_url("keys", "create", *own, "--name", "k", "--project", project).stdout.strip()
    assert by_url("keys", "revoke", *own, key).stdout == f"Revoked {key[3:15]}.\n"
    by_url("plans", "create", "laptops", "--key-limit", "requests_per_minute=60")
    by_url("prices", "add", "laptop-model", "--prompt", "0.15", "--completion", "0.6")
    adjusted = by_url("credits", "adjust", "--tenant", "laptop", "-3.50", "--note", "twice")
    assert "-$3.50" in adjusted.stdout
    assert "Warning" not in by_url("aliases", "set", "laptop/alias", MODEL).stderr
    refused = by_url("models", "remove", MODEL)
    assert "is in use: 1 workers serve it" in _error(refused)
    for command in (
        ("tenants", "list"),
        ("projects", "list", *own),
        ("members", "list", *own),
        ("keys", "list", *own),
        ("keys", "show", *own, key),
        ("plans", "list"),
        ("plans", "show", "laptops"),
        ("prices", "list", "--history"),
        ("credits", "list", "--tenant", "laptop"),
        ("credits", "balance", "--tenant", "laptop"),
        ("models", "list"),
        ("aliases", "list"),
        ("adapters", "list", *own),
        ("webhooks", "list", "--tenant", "laptop"),
        ("files", "list", "--tenant", "laptop"),
        ("batches", "list", "--tenant", "laptop"),
        (
            "usage",
            "show",
            *own,
            "--bucket",
            "total",
            "--start",
            "2026-01-01",
            "--end",
            "2026-02-01",
        ),
        ("usage", "requests", *own),
        ("exports", "list"),
        ("audit", "list", *own, "--limit", "1000"),
    ):
        with case(command):
            assert _json(by_url(*command, "--json")) == _json(direct(*command, "--json"))
            table = by_url(*command)
            assert (table.exit_code, table.stdout) == (0, direct(*command).stdout)
    assert by_url("aliases", "remove", "laptop/alias").exit_code == 0
    actors = {each["actor"] for each in _json(by_url("audit", "list", *own, "--json"))}
    assert {actor.partition("key_")[0] for actor in actors} == {"operator:key:"}


def test_all_pages_of_a_list_are_read(by_url: Run, direct: Run) -> None:
    by_url("tenants", "create", "Many", "--id", "many")
    for number in range(3):
        by_url("projects", "create", "--tenant", "many", f"p{number}")
    listed = _json(by_url("audit", "list", "--tenant", "many", "--limit", "3", "--json"))
    assert [each["action"] for each in listed] == ["project.create"] * 3
    before = str(listed[-1]["sequence"])
    [first] = _json(by_url("audit", "list", "--tenant", "many", "--before", before, "--json"))
    assert first["action"] == "tenant.create"


def test_month_is_exported_by_url_as_directly(by_url: Run, direct: Run, stack: Stack) -> None:
    month = ("usage", "export", "--tenant", "operators", "--month", "2026-01")
    result = by_url(*month)
    assert (result.stdout, result.stderr) == (direct(*month).stdout, "Requests: 0.\n")
    [heading] = csv.reader(io.StringIO(result.stdout))
    assert heading[:4] == ["id", "created_at", "ended_at", "tenant"]


def test_refusals_of_a_gateway_are_one_sentence(by_url: Run, stack: Stack) -> None:
    listing, url = ("tenants", "list"), ("--url", stack.operators)
    for arguments, message in (
        ((*listing, "--key", "sk-wrong"), "The API key is malformed"),
        ((*listing, "--key", stack.key()), "lacks the scope 'admin' or 'admin:read'"),
        (("tenants", "show", "nobody"), 'There is no tenant "nobody".'),
        (("tenants", "show", ""), "'tenant' must be an id"),
        (("tenants", "create", "X", "--weight", "0"), "'weight': Input should be greater"),
        ((*listing, "--url", stack.url), "The route GET /admin/tenants does not exist."),
    ):
        with case(arguments):
            assert message in _error(by_url(*arguments, *(() if "--url" in arguments else url)))
