"""Many small cases in one test: most need far less time than pytest needs for a test."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from _pytest.mark import ParameterSet

Check = Callable[..., Any]


@contextmanager
def case(value: object) -> Iterator[None]:
    """Name the case in any failure within a block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"The case is {value!r}.")
        raise


def all_cases(
    names: str | tuple[str, ...] | list[str],
    values: Iterable[Any],
    *,
    ids: Iterable[object] | Callable[[Any], object] | None = None,
) -> Callable[[Check], Check]:
    """Check all cases in one test, where `pytest.mark.parametrize` makes a test of each.

    Pytest needs milliseconds for a test, most cases microseconds. All cases share the test's
    fixtures, so none may leave anything there. An exception names its case.
    """
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    cases = list(_cases(split, values, ids))
    assert cases

    def decorate(check: Check) -> Check:
        if inspect.iscoroutinefunction(check):

            @functools.wraps(check)
            async def test(**fixtures: Any) -> None:
                for name, arguments in cases:
                    with case(name):
                        await check(**arguments, **fixtures)

        else:

            @functools.wraps(check)
            def test(**fixtures: Any) -> None:
                for name, arguments in cases:
                    with case(name):
                        check(**arguments, **fixtures)

        signature = inspect.signature(check)
        kept = [each for name, each in signature.parameters.items() if name not in split]
        assert len(kept) == len(signature.parameters) - len(split), "no parameter of the test"
        test.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return test

    return decorate


def _cases(
    names: list[str],
    values: Iterable[Any],
    ids: Iterable[object] | Callable[[Any], object] | None,
) -> Iterator[tuple[object, dict[str, Any]]]:
    listed = list(values)
    given = list(ids) if ids is not None and not callable(ids) else [None] * len(listed)
    for value, known in zip(listed, given, strict=True):
        name = known
        if isinstance(value, ParameterSet):
            assert not value.marks, "a case of a loop cannot have marks"
            arguments, name = value.values, value.id or name
        else:
            arguments = (value,) if len(names) == 1 else tuple(value)
        if name is None:
            shown = [ids(each) if callable(ids) else each for each in arguments]
            name = shown[0] if len(shown) == 1 else tuple(shown)
        yield name, dict(zip(names, arguments, strict=True))
