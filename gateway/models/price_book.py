"""In-memory copy of all prices, so that pricing a request needs no query."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import groupby, product
from typing import Final, NamedTuple

from sqlalchemy import select
from typing_extensions import override

from contract.tier import ServiceTier
from gateway.platform.database.engine import Database
from gateway.platform.database.table_copy import TableCopy
from gateway.platform.database.tables import PriceRow
from gateway.records.errors import StoreUnavailableError
from gateway.records.records import PRICE_MICROS, Price

_ALL: Final = select(PriceRow).order_by(PriceRow.effective_at, PriceRow.id)


class Course(NamedTuple):
    """The prices of one model and tier over time."""

    starts: list[datetime]
    prices: list[Price | None]
    """The price from each start on; None from a removal on."""

    def at(self, moment: datetime) -> Price | None:
        """Return the price in force; None before the first one and after a removal."""
        number = bisect_right(self.starts, moment)
        return self.prices[number - 1] if number else None


class PriceBook(TableCopy):
    """A copy of the price table: the last one that was loaded."""

    def __init__(self, database: Database, *, batch_percent: int) -> None:
        """Begin without prices.

        Lines of batches have `batch_percent` of the price in the default tier, unless the model has
        a price in their own tier.
        """
        super().__init__(PriceRow.__tablename__)
        self._database = database
        self._batch_percent = batch_percent
        self._courses: Mapping[tuple[str, ServiceTier], Course] = {}
        self._is_loaded = False

    def find(self, model: str, tier: ServiceTier, at: datetime) -> Price | None:
        """Return the price of a model in a tier at a time; None means free.

        A tier without a price in force has the price of the default tier. Raises
        StoreUnavailableError until the table is loaded for the first time, since serving for free
        would be wrong.
        """
        if not self._is_loaded:
            raise StoreUnavailableError("The prices cannot be read.", retry_after_seconds=1.0)
        if not self._courses:
            return None
        own = self._find(model, tier, at)
        if own is not None:
            return own
        default = self._find(model, ServiceTier.DEFAULT, at)
        if default is None or tier is not ServiceTier.BATCH:
            return default
        return _reduced(default, self._batch_percent)

    def find_first(self, names: Iterable[str], tier: ServiceTier, at: datetime) -> Price | None:
        """Return the price of the first of these names that has one, as `find` does."""
        found = (self.find(name, tier, at) for name in names)
        return next((price for price in found if price is not None), None)

    def in_force(
        self, names: Sequence[str], tier: ServiceTier, start: datetime, end: datetime
    ) -> list[Price | None]:
        """Return what `find_first` returns from `start` to `end`, in order."""
        changes = {
            at
            for key in product(names, {tier, ServiceTier.DEFAULT})
            if (course := self._courses.get(key)) is not None
            for at in course.starts
            if start < at < end
        }
        found = (self.find_first(names, tier, at) for at in sorted({start, *changes}))
        return [price for price, _ in groupby(found)]

    def _find(self, model: str, tier: ServiceTier, at: datetime) -> Price | None:
        course = self._courses.get((model, tier))
        return None if course is None else course.at(at)

    @override
    async def refresh(self) -> None:
        async with self._database.reading() as transaction:
            rows = await transaction.scalars(_ALL)
            prices = [row.to_record() for row in rows]
        self._courses = courses_of(prices)
        self._is_loaded = True


def _reduced(price: Price, percent: int) -> Price:
    """Return a part of a price. Fractions of a micro-dollar are rounded up."""
    micros = {name: -(-getattr(price, name) * percent // 100) for name in PRICE_MICROS}
    return replace(price, **micros)


def courses_of(prices: Iterable[Price]) -> dict[tuple[str, ServiceTier], Course]:
    """Group prices, given in the order in which they take effect, by model and tier."""
    courses: defaultdict[tuple[str, ServiceTier], Course] = defaultdict(lambda: Course([], []))
    for price in prices:
        starts, applied = courses[price.model, price.service_tier]
        if starts and starts[-1] > price.effective_at:
            # This price replaced the one before, while another gateway removed that.
            starts.pop()
            applied.pop()
        removed_at = price.removed_at
        if removed_at is not None and removed_at <= price.effective_at:
            continue
        starts.append(price.effective_at)
        applied.append(price)
        if removed_at is not None:
            starts.append(removed_at)
            applied.append(None)
    return dict(courses)
