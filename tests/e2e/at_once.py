"""Concurrent requests: a step of the engine costs hardly more for many sequences than for one."""

import inspect
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, overload

import pytest

from tests.support.cases import case

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
Check = Callable[..., None]


@overload
def at_once(one: Callable[[], A], two: Callable[[], B], /) -> tuple[A, B]: ...
@overload
def at_once(
    one: Callable[[], A], two: Callable[[], B], three: Callable[[], C], /
) -> tuple[A, B, C]: ...
@overload
def at_once(*calls: Callable[[], A]) -> tuple[A, ...]: ...
def at_once(*calls: Callable[[], Any]) -> tuple[Any, ...]:
    """Return what each call returns; each runs in its own thread."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return tuple([future.result() for future in [threads.submit(call) for call in calls]])


def each_at_once(names: str, cases: Iterable[Any]) -> Callable[[Check], Check]:
    """Make one test of a check of each case: like `pytest.mark.parametrize`, but concurrent.

    A failure names its case. Cases marked long run only in long runs.
    """
    named = names.replace(",", " ").split()
    known = [
        each if hasattr(each, "marks") else pytest.param(*(each if len(named) > 1 else [each]))
        for each in cases
    ]

    def decorate(check: Check) -> Check:
        parameters = inspect.signature(check).parameters

        def check_one(fixtures: dict[str, Any], values: dict[str, Any]) -> None:
            with case(values):
                check(**fixtures, **values)

        def test(request: pytest.FixtureRequest, **fixtures: Any) -> None:
            is_long = request.config.getoption("--long")
            if "request" in parameters:  # Of another decorator of this kind.
                fixtures["request"] = request
            at_once(
                *(
                    partial(check_one, fixtures, dict(zip(named, each.values, strict=True)))
                    for each in known
                    if is_long or not each.marks
                )
            )

        # Pytest reads these to find the fixtures.
        request = inspect.Parameter(
            "request", inspect.Parameter.KEYWORD_ONLY, annotation=pytest.FixtureRequest
        )
        others = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in parameters.items()
            if name not in (*named, "request")
        ]
        test.__signature__ = inspect.Signature([request, *others])  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.pytestmark = getattr(check, "pytestmark", [])  # type: ignore[attr-defined]
        return test

    return decorate
