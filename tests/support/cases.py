"""Many small cases in one test: most need no time, but milliseconds and a database each as tests of their own."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Case = TypeVar("Case")


@contextmanager
def case(value: object) -> Iterator[None]:
    """Name a case in whatever fails within a block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"The case is {value!r}.")
        raise


def for_each(
    cases: Iterable[Case], *, name: Callable[[Case], str]
) -> Callable[[Callable[[Case], None]], Callable[[], None]]:
    """Make one test of a check of each case. What a case raises says which one it is."""
    known = list(cases)
    assert known

    def decorate(check: Callable[[Case], None]) -> Callable[[], None]:
        def test() -> None:
            for each in known:
                with case(name(each)):
                    check(each)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate
