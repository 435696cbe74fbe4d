"""Changes of limits, name by name."""

from typing import Any

import pytest

from gateway.records.errors import InvalidParameterError
from gateway.records.limits import (
    MAX_LIMIT,
    FromPlan,
    LimitName,
    LimitScope,
    changed_limits,
    read_limit_changes,
    read_limits,
)
from tests.support.cases import all_cases


def test_changes_are_merged_by_name_and_plan_removes_an_own_limit() -> None:
    own = {
        LimitName.REQUESTS_PER_MINUTE: 60,
        LimitName.TOKENS_PER_DAY: None,
        LimitName.BUDGET: 5,
    }
    changes = read_limit_changes(
        {"requests_per_minute": None, "budget_micros": "plan", "concurrent_requests": 2}
    )
    assert changes[LimitName.BUDGET] is FromPlan.FROM_PLAN
    assert changed_limits(own, changes) == {
        LimitName.REQUESTS_PER_MINUTE: None,
        LimitName.TOKENS_PER_DAY: None,
        LimitName.CONCURRENT_REQUESTS: 2,
    }
    assert changed_limits({}, {LimitName.BUDGET: FromPlan.FROM_PLAN}) == {}


@all_cases("value", [0, MAX_LIMIT])
def test_bounds_belong_to_the_range(value: int) -> None:
    assert read_limit_changes({"budget_micros": value}) == {LimitName.BUDGET: value}


@all_cases("value", [-1, MAX_LIMIT + 1, True, 1.0, "5", "none", "Plan", [], {}])
def test_invalid_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidParameterError, match="null or an integer from 0") as caught:
        read_limit_changes({"requests_per_day": value})
    assert caught.value.param == "limits.requests_per_day"


@all_cases("value", [0, 101, 50.0])
def test_model_share_is_a_percentage(value: Any) -> None:
    for most in (1, 100, None, "plan"):
        assert read_limit_changes({"model_share_percent": most})
    with pytest.raises(InvalidParameterError, match=rf"from 1 to 100\. Given: {value}\."):
        read_limit_changes({"model_share_percent": value})


@all_cases("scope", [LimitScope.KEY, LimitScope.PROJECT])
def test_only_tenants_have_a_model_share(scope: LimitScope) -> None:
    for read in (read_limits, read_limit_changes):
        with pytest.raises(InvalidParameterError, match="a limit of tenants only") as caught:
            read({"model_share_percent": 50}, scope)
        assert caught.value.param == "limits.model_share_percent"


def test_unknown_name_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(
        InvalidParameterError, match=r'no member "rpm"\. Known: requests_per_minute'
    ):
        read_limit_changes({"rpm": 5})
