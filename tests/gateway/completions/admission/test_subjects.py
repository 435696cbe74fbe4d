"""The holders of limits that count a request, which are found once while nothing changes."""

from types import SimpleNamespace
from typing import Any

import pytest

from common import clock
from gateway.completions.admission.submit import _subjects
from gateway.records.limits import Subjects, Window
from gateway.records.principal import Principal
from gateway.records.times import to_time
from tests.gateway.limits.building import NOON, TENANT, spend_limit, tenant_of

MINUTE_MS = 60_000


def test_spend_limits_follow_the_end_of_a_raise_and_of_a_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: dict[str, Any] = {"raised_micros": 900, "raised_until": to_time(NOON + 5 * MINUTE_MS)}
    limit = spend_limit(window=Window.HOUR, **raised)
    principal = Principal(
        tenant_id=TENANT,
        tenant_weight=1.0,
        credential_id="key_1",
        scopes=frozenset(),
        allowed_models=None,
        limits=Subjects([tenant_of()]),
        spend_limits=(limit,),
    )
    call: Any = SimpleNamespace(principal=principal, body={})
    checked: Any = SimpleNamespace(card=SimpleNamespace(model="m"), adapter=None)

    def at(minute: int) -> Any:
        monkeypatch.setattr(clock, "now_ms", lambda: NOON + minute * MINUTE_MS)
        return _subjects(call, checked)

    first = at(0)
    assert at(4) is first
    assert first[1].limits.budget_micros == 900
    assert at(6)[1].limits.budget_micros == 100
    assert at(6)[1].spending.bounds.start == NOON // 1000
    assert at(60)[1].spending.bounds.start == NOON // 1000 + 3600
