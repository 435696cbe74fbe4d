"""The pages about accounts and usage agree with the code."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from contract.tier import ServiceTier
from gateway.billing.usage.parts import Dimension
from gateway.billing.usage.periods import Bucket
from gateway.cli.main import COMMANDS
from gateway.jobs.schedule import TASKS
from gateway.jobs.webhooks import signature
from gateway.platform.settings import Settings
from gateway.process.app import create_app, create_operator_app
from gateway.records.limits import LimitName
from gateway.records.scopes import ROLE_SCOPES, Scope
from gateway.records.usage_record import Outcome
from tests.support.cases import all_cases
from tests.support.stack import REPOSITORY

ACCOUNTS = (REPOSITORY / "docs" / "accounts.md").read_text()
USAGE = (REPOSITORY / "docs" / "usage.md").read_text()
SECRET, BODY = "whsec_0123456789abcdef", b'{"object":"event","id":"evt_1"}'


@all_cases(
    "names",
    [LimitName, Scope, ServiceTier, Outcome, ROLE_SCOPES],
    ids=lambda names: str(names)[:20],
)
def test_every_name_is_explained(names: Any) -> None:
    assert [name for name in names if f"`{name}`" not in ACCOUNTS] == []


@all_cases("names", [Bucket, Dimension], ids=["buckets", "dimensions"])
def test_every_parameter_of_reports_is_explained(names: Any) -> None:
    assert [name for name in names if f"`{name}`" not in USAGE] == []


def test_roles_have_the_scopes_of_the_table() -> None:
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| ((?:`[\w:]+`(?:, )?)+) \|$", ACCOUNTS, re.MULTILINE
    )
    documented = {
        role: set(re.findall(r"`([\w:]+)`", scopes))
        for roles, scopes in rows
        for role in re.findall(r"`(\w+)`", roles)
    }
    assert documented == {role: set(scopes) for role, scopes in ROLE_SCOPES.items()}


def test_every_route_of_the_management_api_is_named() -> None:
    app = create_app(Settings())
    operators = create_operator_app(Settings(), app)
    paths = app.openapi()["paths"] | operators.openapi()["paths"]
    described = (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        *("/v1/audio", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"),
        "/v1/models",
        "/v1/health",
    )
    root = re.compile(r"/v1/\w+|/admin/tenants/\{tenant_id\}/\w+|/admin/\w+")
    matches = [root.match(path) for path in paths if not path.startswith(described)]
    roots = {match[0] for match in matches if match is not None}
    assert len(roots) > 15
    assert [each for each in sorted(roots) if f"{each}" not in ACCOUNTS + USAGE] == []


def test_every_command_and_every_job_is_named() -> None:
    managing = set(COMMANDS) - {
        *("up", "console", "gateway", "worker", "host", "capacity", "check", "db")
    }
    assert [name for name in managing if f"`sluice {name}" not in ACCOUNTS + USAGE] == []
    table = dict(re.findall(r"^\| ([\w ]+) \| (\d+ \w+) \|", USAGE, re.MULTILINE))
    seconds = {name: f"{job.schedule:g} s" for name, job in _timed_jobs().items()}
    assert seconds.items() <= table.items()
    assert len(table) == len(TASKS)


def _timed_jobs() -> dict[str, Any]:
    return {job.name.replace("_", " "): job for job in TASKS if isinstance(job.schedule, float)}


@pytest.fixture
def verify() -> Callable[..., bool]:
    """The example function of the page for customers."""
    [code] = re.findall(r"```python\n(.*?)```", USAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    function: Callable[..., bool] = names["verify"]
    return function


def test_documented_function_verifies_signatures_of_events(verify: Callable[..., bool]) -> None:
    now = int(time.time())
    header = signature(SECRET, BODY, now)
    assert verify(SECRET, header, BODY)
    assert not verify(SECRET, header, BODY + b" ")
    assert not verify(f"{SECRET}0", header, BODY)
    assert not verify(SECRET, header.replace(f"t={now}", f"t={now - 1}"), BODY)
    assert not verify(SECRET, signature(SECRET, BODY, now - 301), BODY)
    assert verify(SECRET, signature(SECRET, BODY, now - 301), BODY, tolerance_seconds=400)


@pytest.mark.parametrize("header", ["", "t=,v1=", "t=x,v1=y", "v1=00", "t=1", "nonsense", ",,="])
def test_malformed_signature_is_refused(verify: Callable[..., bool], header: str) -> None:
    assert verify(SECRET, header, BODY) is False
