"""The commands that manage plans, prices, credits and webhooks."""

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from gateway.billing.exports.store import ExportStore
from gateway.platform.database.engine import Database
from gateway.records.money import show_dollars
from gateway.records.times import utc_now
from tests.support.billing import rejected_batch
from tests.support.cases import case
from tests.support.secret_box import ENCRYPTION_KEY

Sluice = Callable[..., Result]

pytestmark = pytest.mark.usefixtures("upgraded")


def _json(result: Result) -> object:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _refusal(result: Result) -> str:
    assert result.exit_code != 0
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def test_help_has_examples(sluice: Sluice) -> None:
    listed = sluice("--help").output
    for group in ("plans", "prices", "credits", "webhooks", "aliases", "exports"):
        with case(group):
            result = sluice(group, "--help")
            assert result.exit_code == 0
            assert f"Examples:\n    sluice {group} " in result.output
            assert f"  {group} " in listed


def test_plan_is_created_changed_and_shown(sluice: Sluice) -> None:
    made = _json(
        sluice("plans", "create", "pro", "--key-limit", "requests_per_minute=60", "--json")
    )
    assert isinstance(made, dict)
    assert (made["id"], made["name"]) == ("pro", "pro")
    assert made["key_limits"] == {"requests_per_minute": 60}
    changed = sluice(
        "plans",
        "set",
        "pro",
        "--tenant-limit",
        "budget=5",
        "--key-limit",
        "requests_per_minute=none",
    )
    assert changed.exit_code == 0
    assert "budget=$5.00" in changed.output
    shown = sluice("plans", "show", "pro")
    assert "tenant  budget  $5.00" in shown.output
    assert "requests_per_minute" not in shown.output
    assert _json(sluice("plans", "list", "--json")) == [
        {**made, "key_limits": {}, "tenant_limits": {"budget_micros": 5000000}}
    ]


WRONG_LIMITS: list[tuple[Any, str]] = [
    ("requests=5", "'key_limits' has no member"),
    ("requests_per_minute", "must be null or an integer"),
    ("requests_per_minute=-1", "must be null or an integer"),
    ("requests_per_minute=1.5", "must be null or an integer"),
    ("requests_per_minute=" + "9" * 5000, "must be null or an integer"),
    ("requests_per_minute=²", "must be null or an integer"),
]
"""Arguments, and their errors."""


def test_wrong_limit_is_refused(sluice: Sluice) -> None:
    for limit, message in WRONG_LIMITS:
        with case(limit[:40]):
            assert message in _refusal(sluice("plans", "create", "p", "--key-limit", limit))


def test_alias_is_set_listed_and_removed(sluice: Sluice) -> None:
    options = ("--sticky", "user", "--fallback", "none", "--sunset", "2999-01-01")
    result = sluice("aliases", "set", "chat", "none=95", "org/n=v=5", *options, "--json")
    assert 'Warning: No worker has announced "none", "org/n=v".' in result.stderr
    made = _json(result)
    assert isinstance(made, dict)
    assert (made["weights"], made["replacement"]) == ({"none": 95, "org/n=v": 5}, "none")
    assert sluice("aliases", "list").output.splitlines()[1].split() == (
        ["chat", "none=95", "org/n=v=5", "user", "none", "2999-01-01", "00:00:00", "UTC"]
    )
    for models, message in (
        (("m=-1",), 'an integer from 0 to 1000000. Given: "m=-1".'),
        (("m=x",), "'models' must be MODEL or MODEL=WEIGHT with an integer from 0 to 1000000."),
        (("m", "m=2"), "'models' must name each model once. Given twice: \"m\"."),
        (("m=0",), "'weights' must have a weight greater than 0."),
    ):
        assert message in _refusal(sluice("aliases", "set", "chat", *models))
    removed = sluice("aliases", "remove", "chat")
    assert removed.output == "Removed 'chat'. Gateways apply this within a second.\n"
    assert _json(sluice("aliases", "list", "--json")) == []


def test_prices_are_given_in_dollars_and_stored_in_micro_dollars(sluice: Sluice) -> None:
    added = _json(
        sluice("prices", "add", "m", "--prompt", "0.15", "--completion", "0.600001", "--json")
    )
    assert isinstance(added, dict)
    assert added["prompt_micros"] == added["cached_micros"] == 150_000
    assert added["completion_micros"] == 600_001
    flex = sluice(
        *("prices", "add", "m", "--tier", "flex", "--prompt", "$2", "--completion", "0"),
        *("--cached", "0.5", "--effective-at", "2999-01-01"),
    )
    assert flex.exit_code == 0, flex.output
    assert "m      flex  $2.00   $0.50   $0.00       $0.00  2999-01-01 00:00:00 UTC" in flex.output
    assert _json(sluice("prices", "list", "--json")) == [added]
    history = _json(sluice("prices", "list", "--model", "m", "--history", "--json"))
    assert isinstance(history, list)
    assert [price["service_tier"] for price in history] == ["default", "flex"]
    removed = sluice("prices", "remove", str(added["id"]))
    assert removed.output == f"Removed the price {added['id']}.\n"
    assert _json(sluice("prices", "list", "--json")) == []


def test_inexact_amount_is_refused(sluice: Sluice) -> None:
    for amount in ("0.1234567", "1e3", "", ".5", "1,5", "nan", "٣", "1_000"):
        with case(amount):
            output = _refusal(sluice("prices", "add", "m", "--prompt", amount, "--completion", "1"))
            assert "at most six decimals" in output
    assert _json(sluice("prices", "list", "--json")) == []


WRONG_PRICES: list[tuple[Any, str]] = [
    (("--prompt", "-1"), "'--prompt': '-1' is not an amount from $0.00 to $1,000,000.00."),
    (("--prompt", "1", "--cached", "2"), "'cached_micros' must be <= 'prompt_micros'"),
    (("--prompt", "1", "--effective-at", "2020-01-01"), "must not be in the past"),
    (("--prompt", "1", "--effective-at", "soon"), "is not a time such as"),
    (("--prompt", "1", "--effective-at", "0001-01-01T00:00+14:00"), "is not a time such as"),
]
"""Arguments, and their errors."""


def test_wrong_price_is_refused(sluice: Sluice) -> None:
    for arguments, message in WRONG_PRICES:
        with case(arguments):
            refused = sluice("prices", "add", "m", "--completion", "1", *arguments)
            assert message in _refusal(refused)


def test_credits_are_granted_adjusted_and_shown(sluice: Sluice) -> None:
    granted = _json(
        sluice(
            *("credits", "grant", "--tenant", "acme", "100.25", "--note", "trial"),
            *("--expires-at", "2999-01-01T12:00+02:00", "--json"),
        )
    )
    assert isinstance(granted, dict)
    assert (granted["amount_micros"], granted["kind"]) == (100_250_000, "grant")
    assert granted["expires_at"] == "2999-01-01T10:00:00Z"
    adjusted = sluice("credits", "adjust", "--tenant", "acme", "-3.50", "--note", "twice")
    assert adjusted.exit_code == 0, adjusted.output
    assert "-$3.50" in adjusted.output
    assert _json(sluice("credits", "balance", "--tenant", "acme", "--json")) == {
        "tenant": "acme",
        "granted_micros": 96_750_000,
        "spent_micros": 0,
        "balance_micros": 96_750_000,
    }
    assert (
        "acme    $96.75   $0.00  $96.75" in sluice("credits", "balance", "--tenant", "acme").output
    )
    listed = sluice("credits", "list", "--tenant", "acme")
    assert "$100.25" in listed.output
    assert "twice" in listed.output
    audit = sluice("audit", "list", "--json")
    assert '"credit.adjust"' in audit.output
    assert '"cli:' in audit.output


WRONG_CREDITS: list[tuple[Any, str]] = [
    (("grant", "--tenant", "acme", "0"), "'AMOUNT': '0' is not an amount from $0.000001 to"),
    (("grant", "--tenant", "acme", "-5"), "'AMOUNT': '-5' is not an amount from $0.000001 to"),
    (("grant", "--tenant", "nobody", "5"), "There is no tenant"),
    (("adjust", "--tenant", "acme", "5"), "Missing option '--note'"),
    (("adjust", "--tenant", "acme", "5", "--note", ""), "'note' must not be empty"),
    (("adjust", "--tenant", "acme", "0.0000001", "--note", "x"), "at most six decimals"),
    (("balance", "--tenant", "nobody"), "There is no tenant"),
]
"""Arguments, and their errors."""


def test_wrong_credit_is_refused(sluice: Sluice) -> None:
    for arguments, message in WRONG_CREDITS:
        with case(arguments):
            assert message in _refusal(sluice("credits", *arguments))


def test_webhook_is_registered_tested_and_removed(
    sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = (
        "webhooks",
        "create",
        "--tenant",
        "acme",
        "https://example.com/x",
        "--threshold",
        "90",
    )
    assert "SLUICE_ENCRYPTION_KEYS" in _refusal(sluice(*create))
    monkeypatch.setenv("SLUICE_ENCRYPTION_KEYS", ENCRYPTION_KEY)
    created = sluice(*create)
    assert created.exit_code == 0, created.output
    secret = created.stdout.strip()
    assert secret.startswith("whsec_")
    assert "cannot be shown again" in created.stderr
    (webhook,) = list(json.loads(sluice("webhooks", "list", "--tenant", "acme", "--json").stdout))
    assert webhook["thresholds"] == [90]
    assert secret not in sluice("webhooks", "list", "--tenant", "acme").output
    assert (
        "will be sent within seconds"
        in sluice("webhooks", "test", "--tenant", "acme", webhook["id"]).output
    )
    assert "Removed" in sluice("webhooks", "remove", "--tenant", "acme", webhook["id"]).output
    assert sluice("webhooks", "list", "--tenant", "acme").output == "None.\n"
    private = ("webhooks", "create", "--tenant", "acme", "http://127.0.0.1:5/x", "--json")
    assert "must begin with https" in _refusal(sluice(*private))
    monkeypatch.setenv("SLUICE_WEBHOOK_ALLOW_PRIVATE", "true")
    made = _json(sluice(*private))
    assert isinstance(made, dict)
    assert made["secret"].startswith("whsec_")
    assert made["thresholds"] == [50, 80, 100]


SHOWN = {
    0: "$0.00",
    1: "$0.000001",
    150_000: "$0.15",
    -3_500_000: "-$3.50",
    1_234_567_000_000: "$1,234,567.00",
    123_456: "$0.123456",
}
"""Amounts by their micro-dollars."""


def test_amounts_are_shown_exactly() -> None:
    assert {micros: show_dollars(micros) for micros in SHOWN} == SHOWN


def test_exports_are_listed_paused_repaired_and_removed(sluice: Sluice) -> None:
    async def register() -> None:
        database = Database(os.environ["SLUICE_DATABASE_URL"])
        async with database.writing() as transaction:
            row = await ExportStore(transaction).register("meter", "openmeter", utc_now())
            transaction.add(rejected_batch(row))
        await database.aclose()

    asyncio.run(register())
    exports: Any = _json(sluice("exports", "list", "--json"))
    [listed] = exports
    assert (listed["name"], listed["kind"], listed["batches"]["rejected"]) == (
        "meter",
        "openmeter",
        1,
    )
    batches: Any = _json(sluice("exports", "batches", "meter", "--state", "rejected", "--json"))
    assert [each["identifier"] for each in batches] == ["cmpl-1"]
    number = str(batches[0]["id"])
    assert sluice("exports", "retry", "meter").output.startswith("1 batches")
    assert "no rejected or uncertain batch" in _refusal(
        sluice("exports", "discard", "meter", number)
    )
    assert sluice("exports", "pause", "meter").exit_code == 0
    assert " paused " in sluice("exports", "list").output
    assert sluice("exports", "resume", "meter").exit_code == 0
    assert sluice("exports", "remove", "meter").exit_code == 0
    assert "There is no sink" in _refusal(sluice("exports", "pause", "meter"))
    assert _json(sluice("exports", "list", "--json")) == []
    audited: Any = _json(sluice("audit", "list", "--json"))
    actions = {each["action"] for each in audited}
    assert {"export.retry", "export.pause", "export.resume", "export.remove"} <= actions
