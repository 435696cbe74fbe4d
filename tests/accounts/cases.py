"""Many small cases in one test: most need no time, but a database each where they are tests of their own."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(value: object) -> Iterator[None]:
    """Name a case in whatever fails within a block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"The case is {value!r}.")
        raise
