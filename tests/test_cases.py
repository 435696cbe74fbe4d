"""Tests of many cases check all of them, and name the one that fails."""

import inspect
from typing import Any

import pytest

from tests.support.cases import all_cases


def test_each_combination_is_checked_with_the_fixtures_of_the_test() -> None:
    seen = []

    @all_cases("first", [1, 2])
    @all_cases(("second", "third"), [("a", "b"), pytest.param("c", "d", id="other")])
    def check(fixture: str, first: int, second: str, third: str) -> None:
        seen.append((fixture, first, second, third))

    assert list(inspect.signature(check).parameters) == ["fixture"]
    check(fixture="f")
    assert seen == [("f", 1, "a", "b"), ("f", 1, "c", "d"), ("f", 2, "a", "b"), ("f", 2, "c", "d")]


async def test_coroutines_are_awaited() -> None:
    seen = []

    @all_cases("number", range(3))
    async def check(number: int) -> None:
        seen.append(number)

    await check()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "-1"), ({"ids": ["one", "minus one"]}, "'minus one'"), ({"ids": abs}, "1")],
)
def test_failure_names_its_case(options: dict[str, Any], name: str) -> None:
    @all_cases("number", [2, -1], **options)
    def check(number: int) -> None:
        assert number > 0

    with pytest.raises(AssertionError) as failed:
        check()
    assert failed.value.__notes__ == [f"The case is {name}."]


def test_unknown_parameters_and_marks_are_refused() -> None:
    for values in ([], [pytest.param(1, marks=pytest.mark.long)]):
        with pytest.raises(AssertionError):
            all_cases("number", values)
    with pytest.raises(AssertionError):
        all_cases("nobody", [1])(test_coroutines_are_awaited)
