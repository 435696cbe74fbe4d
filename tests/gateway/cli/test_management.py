"""The commands for limits, projects, members and keys."""

import asyncio
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import Result

from gateway.accounts.audit.log import AuditEntryBody, AuditLog
from gateway.platform.database.engine import Database
from gateway.platform.settings import load_settings
from tests.support.cases import case

Sluice = Callable[..., Result]

pytestmark = pytest.mark.usefixtures("upgraded")


def _json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _error(result: Result) -> str:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line.removeprefix("Error: ")


def _audited() -> list[AuditEntryBody]:
    async def read() -> list[AuditEntryBody]:
        database = Database(load_settings().database_url.get_secret_value())
        try:
            async with database.reading() as transaction:
                return (await AuditLog(transaction).entries())[::-1]
        finally:
            await database.aclose()

    return asyncio.run(read())


def test_tenant_is_set_shown_and_its_limits_merged(sluice: Sluice) -> None:
    limits = ("--limit", "requests_per_minute=600", "--limit", "budget=none")
    options = ("--billing", "prepaid", "--service-tier", "flex", "--show-cost", "--weight", "3")
    origins = ("--cors-origin", "https://a.example", "--cors-origin", "HTTP://localhost:3000")
    given = ("--name", "New", *limits, *options, *origins)
    changed = _json(sluice("tenants", "set", "acme", *given, "--json"))
    assert changed["limits"] == {"requests_per_minute": 600, "budget_micros": None}
    assert (changed["name"], changed["billing"], changed["service_tier"]) == (
        *("New", "prepaid"),
        "flex",
    )
    assert (changed["shows_cost"], changed["weight"]) == (True, 3.0)
    assert changed["cors_origins"] == ["https://a.example", "http://localhost:3000"]
    again = ("--limit", "requests_per_minute=plan", "--limit", "tokens_per_day=5")
    removed = ("--no-show-cost", "--cors-origin", "none")
    table = sluice("tenants", "set", "acme", *again, *removed).stdout.splitlines()
    set_limits = "budget=none,tokens_per_day=5"
    assert table[1].split()[7:11] == ["-", set_limits, "prepaid", "flex"]
    assert _json(sluice("tenants", "show", "acme", "--json"))["limits"] == {
        "budget_micros": None,
        "tokens_per_day": 5,
    }
    shown = dict(
        line.split(maxsplit=1) for line in sluice("tenants", "show", "acme").stdout.splitlines()
    )
    assert shown["OPTION"] == "VALUE"
    assert shown["limits.budget"] == "none"
    assert re.fullmatch(r"20\d\d-\S+Z \(20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \S+\)", shown["created_at"])
    assert shown["cors_origins"] == "none"
    assert shown["limits.tokens_per_day"] == "5"
    assert (shown["shows_cost"], shown["status"], shown["plan_id"]) == ("no", "active", "none")


SENSELESS = {
    "rpm=5": "'limits' has no member \"rpm\".",
    "requests_per_minute": "'limit' must be NAME=VALUE",
    "requests_per_minute=": "'limit' must be NAME=VALUE",
    "requests_per_minute=-1": "'limit' must be NAME=VALUE",
    "requests_per_minute=1.5": "'limit' must be NAME=VALUE",
    "requests_per_minute=²": "'limit' must be NAME=VALUE",
    f"requests_per_minute={10**16}": "integer from 0 to",
    f"requests_per_minute={'9' * 5000}": "integer from 0 to",
}
"""Limits, and their errors."""


def test_invalid_limit_is_refused(sluice: Sluice) -> None:
    for limit, message in SENSELESS.items():
        with case(limit[:40]):
            assert message in _error(sluice("tenants", "set", "acme", "--limit", limit))
            assert message in _error(
                sluice("keys", "create", "--tenant", "acme", "--name", "x", "--limit", limit)
            )


def test_unknown_plan_is_refused(sluice: Sluice) -> None:
    assert "'plan_id' must be the id of a plan" in _error(
        sluice("tenants", "set", "acme", "--plan", "gold")
    )
    assert _json(sluice("tenants", "set", "acme", "--plan", "none", "--json"))["plan_id"] is None


def test_project_is_created_changed_and_archived(sluice: Sluice) -> None:
    own = ("--tenant", "acme")
    made = _json(
        sluice("projects", "create", *own, "shop", "--limit", "tokens_per_day=7", "--json")
    )
    assert (made["name"], made["limits"]) == ("shop", {"tokens_per_day": 7})
    changed = sluice("projects", "set", *own, made["id"], "--name", "store")
    heading, row = changed.stdout.splitlines()
    assert heading.split() == ["ID", "NAME", "STATUS", "LIMITS", "CREATED"]
    assert row.split()[:4] == [made["id"], "store", "active", "tokens_per_day=7"]
    assert "archived" in sluice("projects", "archive", *own, made["id"]).stdout
    assert "not archived" in _error(
        sluice("keys", "create", *own, "--name", "x", "--project", made["id"])
    )
    [listed] = _json(sluice("projects", "list", *own, "--json"))
    assert listed["status"] == "archived"
    active = _json(sluice("projects", "activate", *own, made["id"], "--json"))
    assert active == made | {"name": "store"}
    key = _json(sluice("keys", "create", *own, "--name", "x", "--project", made["id"], "--json"))
    assert key["project_id"] == made["id"]
    assert 'no project "prj_1"' in _error(sluice("projects", "archive", *own, "prj_1"))


def test_spend_limit_is_added_raised_and_removed(sluice: Sluice) -> None:
    given = ("--tenant", "acme", "--scope", "tenant", "--window", "day", "--amount", "5")
    added = _json(sluice("spend-limits", "add", *given, "--json"))
    assert (added["amount_micros"], added["used_micros"]) == (5_000_000, 0)
    of = ("--tenant", "acme", added["id"])
    # An amount that is not set has no text.
    row = sluice("spend-limits", "list", "--tenant", "acme").stdout.splitlines()[-1]
    assert row.split()[5:9] == ["$5.00", "-", "-", "$0.00"]
    until = (datetime.now(UTC) + timedelta(days=2)).isoformat()
    raise_ = ("--raised", "50", "--raised-until", until, "--raise-reason", "launch")
    raised = _json(sluice("spend-limits", "set", *of, *raise_, "--json"))
    assert raised["raised_micros"] == 50_000_000
    assert _json(sluice("spend-limits", "show", *of, "--json"))["id"] == added["id"]
    assert sluice("spend-limits", "remove", *of).exit_code == 0
    assert _json(sluice("spend-limits", "list", "--tenant", "acme", "--json")) == []


def test_member_is_added_changed_and_removed(sluice: Sluice) -> None:
    own = ("--tenant", "acme")
    ada = _json(
        sluice("members", "add", *own, "auth0|1", "--role", "owner", "--name", "Ada", "--json")
    )
    assert "last owner" in _error(sluice("members", "remove", *own, "auth0|1"))
    sluice("members", "add", *own, "bob", "--role", "owner")
    changed = sluice("members", "set", *own, ada["id"], "--role", "viewer").stdout.splitlines()
    assert changed[0].split() == ["ID", "SUBJECT", "NAME", "ROLE", "ADDED"]
    assert changed[1].split()[:4] == [ada["id"], "auth0|1", "Ada", "viewer"]
    removed = sluice("members", "remove", *own, "auth0|1")
    assert removed.stdout == f"Removed {ada['id']} (auth0|1).\n"
    [bob] = _json(sluice("members", "list", *own, "--json"))
    assert (bob["subject"], bob["name"], bob["role"]) == ("bob", "bob", "owner")
    assert sluice("members", "add", *own, "eve", "--role", "king").exit_code == 2


def test_addresses_and_limits_of_a_key_are_set_and_removed(sluice: Sluice) -> None:
    own = ("--tenant", "acme")
    made = _json(
        sluice(
            *("keys", "create", *own, "--name", "x", "--limit", "requests_per_minute=5"),
            *("--address", "10.0.0.0/8", "--address", "::1", "--json"),
        )
    )
    assert made["allowed_addresses"] == ["10.0.0.0/8", "::1/128"]
    assert made["limits"] == {"requests_per_minute": 5}
    changed = _json(
        sluice(
            *("keys", "set", *own, made["id"], "--name", "y", "--scope", "usage"),
            *("--model", "m1", "--address", "192.0.2.1", "--expires-in", "1h"),
            *("--limit", "requests_per_minute=none", "--json"),
        )
    )
    assert (changed["name"], changed["scopes"], changed["allowed_models"]) == (
        *("y", ["usage"]),
        ["m1"],
    )
    assert (changed["allowed_addresses"], changed["limits"]) == (
        ["192.0.2.1/32"],
        {"requests_per_minute": None},
    )
    ends_in = datetime.fromisoformat(changed["expires_at"]) - datetime.now(UTC)
    assert abs(ends_in - timedelta(hours=1)) < timedelta(minutes=1)
    taken = ("--model", "none", "--address", "none", "--expires-in", "none")
    free = _json(sluice("keys", "set", *own, made["id"], *taken, "--json"))
    assert (free["allowed_models"], free["allowed_addresses"], free["expires_at"]) == (
        *(None, None),
        None,
    )
    assert _json(sluice("keys", "show", *own, made["prefix"], "--json")) == free
    assert "10.0.0.0/8 for the network" in _error(
        sluice("keys", "set", *own, made["id"], "--address", "10.0.0.1/8")
    )


def test_rotated_key_is_shown_once(sluice: Sluice) -> None:
    own = ("--tenant", "acme")
    made = _json(sluice("keys", "create", *own, "--name", "x", "--json"))
    result = sluice("keys", "rotate", *own, made["key"])
    assert result.exit_code == 0
    new = result.stdout.strip()
    assert new.startswith("sk-")
    assert new != made["key"]
    assert made["id"] in result.stderr
    assert made["key"][16:] not in result.output
    shown = sluice("keys", "show", *own, made["id"], "--json")
    assert new[16:] not in shown.output
    ends_in = datetime.fromisoformat(_json(shown)["old_expires_at"]) - datetime.now(UTC)
    assert abs(ends_in - timedelta(days=1)) < timedelta(minutes=1)
    at_once = _json(sluice("keys", "rotate", *own, made["id"], "--grace", "0", "--json"))
    assert (at_once["old_prefix"], at_once["key"][3:15]) == (None, at_once["prefix"])
    assert "less than or equal to 2592000" in _error(
        sluice("keys", "rotate", *own, made["id"], "--grace", "31d")
    )
    assert sluice("keys", "rotate", *own, made["id"], "--grace", "soon").exit_code == 2
    assert sluice("keys", "create", *own, "--name", "x", "--expires-in", "0").exit_code == 2


def test_user_of_the_command_line_is_audited(
    sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    own = ("--tenant", "acme")
    key = _json(sluice("keys", "create", *own, "--name", "x", "--json"))
    sluice("keys", "set", *own, key["id"], "--name", "y")
    rotated = _json(sluice("keys", "rotate", *own, key["id"], "--json"))
    sluice("keys", "revoke", *own, key["id"])
    sluice("tenants", "suspend", "acme")
    sluice("tenants", "activate", "acme")
    sluice("members", "add", *own, "bob", "--role", "viewer")
    sluice("members", "remove", *own, "bob")
    sluice("projects", "create", *own, "p")
    rows = _audited()[1:]
    assert [row.action for row in rows] == [
        *("key.create", "key.update", "key.rotate", "key.revoke"),
        *("tenant.suspend", "tenant.activate", "member.add", "member.remove", "project.create"),
    ]
    assert {row.actor for row in rows} == {"cli:ada"}
    for secret in (key["key"], rotated["key"]):
        assert secret[16:] not in str(rows)
