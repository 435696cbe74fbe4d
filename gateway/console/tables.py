"""Tables and forms as data: a page lists its columns and fields, and one template shows them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

_AMOUNTS: Final = re.compile("money|price|budget")
"""Kinds of columns whose cells are numbers to the eye."""


class Cell(NamedTuple):
    """What one row has in a column."""

    text: str
    href: str = ""
    kind: str = ""
    """Classes of the text: good, warn, bad or muted."""
    label: str = ""
    """What the link does, for those who do not see the row."""


class Card(NamedTuple):
    """A number with what it says."""

    title: str
    value: str
    text: str
    kind: str = ""
    """Class of the value: warn or bad."""
    href: str = ""


class Step(NamedTuple):
    """What is missing, and the link to where it is made."""

    text: str
    href: str
    label: str
    name: str = ""
    """The link for those who do not see the text, if the label alone is not enough."""


class Column(NamedTuple):
    """A column; the first one of a table names its rows."""

    title: str
    value: Callable[[Any], Any]
    """Returns a `Cell` or text of a row; numbers, amounts and times by the kind."""
    kind: str = ""
    """`num`, `money` or `price` (micro-dollars; a price exactly), `budget` (the spent and
    the allowed amount), `time`, `below` (a long text on a line of its own), or classes of the
    cells such as mono or wide."""
    order: Callable[[Any], Any] | None = None
    """Returns what rows are sorted by; by default, the value."""

    @property
    def classes(self) -> str:
        """The classes of its cells."""
        return _AMOUNTS.sub("num", self.kind)


class Sort(NamedTuple):
    """How rows are sorted by a column."""

    href: str
    """The link that sorts by it, or the other way round."""
    state: str
    """`ascending`, `descending`, or empty if they are not sorted by it."""


class Table(NamedTuple):
    """A table with its rows."""

    label: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    empty: str
    """What to show without rows."""
    sums: Any = None
    """One more row, below a line."""
    sorts: Mapping[str, Sort] = MappingProxyType({})
    """By the titles of the columns that sort the rows."""


class Field(NamedTuple):
    """A field of a form."""

    name: str
    label: str
    hint: str = ""
    type: str = "text"
    """The type of the input, `textarea`, `checkbox`, a text with a `number`, an amount in `dollars`
    or several `words`, or a `name` that is one of the options as a rule. With a `file`, see
    `UploadRoute`."""
    options: Sequence[tuple[str, str]] | None = None
    """Values and texts of a list to choose from."""
    is_required: bool = False
    placeholder: str = ""
    default: str = ""
    """What an empty field stands for."""

    @property
    def input(self) -> str:
        """The type of its input."""
        return "text" if self.type in ("dollars", "number", "words") else self.type


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return options whose texts are their values."""
    return [(name, name) for name in names]


class Action(NamedTuple):
    """What the head of a page offers to visitors who may change something."""

    text: str
    href: str
    is_post: bool = False
    """Whether it is done at once; otherwise it is a link."""


class Search(NamedTuple):
    """The form above a list that filters it."""

    fields: Sequence[Field]
    form: Mapping[str, str]
    button: str = "Show"


class Adding(NamedTuple):
    """The form below a list that adds to it."""

    title: str
    fields: Sequence[Field]
    form: Mapping[str, str]
    button: str


class Group(NamedTuple):
    """Fields that belong together."""

    legend: str
    fields: Sequence[Field]
    hint: str = ""
    is_folded: bool = False
    more: Sequence[Field] = ()
    """Rare fields, which are folded away."""
