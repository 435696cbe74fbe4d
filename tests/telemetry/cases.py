"""Many small cases in one test: each takes microseconds, and a test of its own milliseconds."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")


def for_each(
    cases: Iterable[Case], *, name: Callable[[Case], str]
) -> Callable[[Callable[[Case], None]], Callable[[], None]]:
    """Make one test of a check of each case. What a case raises says which one it is."""
    known = list(cases)
    assert known

    def decorate(check: Callable[[Case], None]) -> Callable[[], None]:
        def test() -> None:
            for case in known:
                try:
                    check(case)
                except Exception as error:
                    error.add_note(f"The case is {name(case)}.")
                    raise

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate
