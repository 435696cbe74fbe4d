"""Shared parts of all tables: the metadata with its naming rules, and column types."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Generic, TypeVar, get_args

from sqlalchemy import JSON, BigInteger, DateTime, Enum, ForeignKey, Integer, MetaData, String
from sqlalchemy import Dialect as Database
from sqlalchemy.orm import DeclarativeBase, mapped_column
from sqlalchemy.types import TypeDecorator
from typing_extensions import override

from contract.dialect import Dialect
from contract.tier import ServiceTier
from gateway.records.limits import LimitName, LimitValues

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_name)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
"""The same names on every database, so that a migration can refer to a constraint."""


def record_of(row: object, kind: type[T], **values: Any) -> T:
    """Return a dataclass with the values, and otherwise with the row's columns by their names."""
    for name in kind.__dataclass_fields__:
        if name not in values:
            values[name] = getattr(row, name)
    return kind(**values)


class Recorded(Generic[T]):
    """A row that other packages get as a record, of the class in brackets."""

    _record: ClassVar[type[Any]]

    @override
    def __init_subclass__(cls, **options: Any) -> None:
        [cls._record] = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        super().__init_subclass__(**options)

    def to_record(self) -> T:
        """Return the row as a record."""
        found: T = record_of(self, self._record)
        return found


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time: always aware and in UTC, on every database.

    SQLite has no time zones, so it stores the UTC time without one.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    @override
    def process_bind_param(self, value: datetime | None, dialect: Database) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"A time for the database must have a time zone, got {value!r}")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    @override
    def process_result_value(self, value: datetime | None, dialect: Database) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class DialectName(TypeDecorator[Dialect]):
    """An API dialect.

    A dialect that only a later release supports reads as None, so that this release can still serve
    tenants of that release. For the same reason the database does not check the names.
    """

    impl = String(32)
    cache_ok = True

    @override
    def process_bind_param(self, value: Dialect | None, dialect: Database) -> str | None:
        return None if value is None else value.value

    @override
    def process_result_value(self, value: str | None, dialect: Database) -> Dialect | None:
        return Dialect(value) if value in set(Dialect) else None


_TIERS: Final = {tier.value: tier for tier in ServiceTier}


class TierName(TypeDecorator[ServiceTier]):
    """A service tier; one that only a later release supports reads as the default tier."""

    impl = String(32)
    cache_ok = True

    @override
    def process_bind_param(self, value: ServiceTier | None, dialect: Database) -> str | None:
        return None if value is None else value.value

    @override
    def process_result_value(self, value: str | None, dialect: Database) -> ServiceTier | None:
        return None if value is None else _TIERS.get(value, ServiceTier.DEFAULT)


class LimitsColumn(TypeDecorator[LimitValues]):
    """Limits by name, as JSON; names that only a later release supports are left out."""

    impl = JSON
    cache_ok = True

    @override
    def process_bind_param(self, value: LimitValues | None, dialect: Database) -> Any:
        return None if value is None else {name.value: limit for name, limit in value.items()}

    @override
    def process_result_value(self, value: Any, dialect: Database) -> LimitValues:
        known = set(LimitName)
        return {LimitName(name): limit for name, limit in (value or {}).items() if name in known}


class OriginsColumn(TypeDecorator[tuple[str, ...]]):
    """Origins of web pages, as JSON; null if there are none."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    @override
    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Database) -> Any:
        return list(value) if value else None

    @override
    def process_result_value(self, value: Any, dialect: Database) -> tuple[str, ...]:
        return tuple(value or ())


def enum_column(enum: type[StrEnum], name: str, *, is_checked: bool = True) -> Enum:
    """Return a column type that stores an enum's values as text.

    The database checks the values unless the column was added later: SQLite cannot add the check.
    """
    return Enum(
        enum,
        name=name,
        native_enum=False,
        create_constraint=is_checked,
        length=32,
        values_callable=lambda members: [member.value for member in members],
    )


class Table(DeclarativeBase):
    """Base of all tables. A column whose class does not name its type has the one given here."""

    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map: ClassVar = {
        datetime: UtcDateTime,
        int: BigInteger,
        Dialect: DialectName,
        ServiceTier: TierName,
        LimitValues: LimitsColumn,
        list[str]: JSON,
        list[int]: JSON,
        dict[str, int]: JSON,
        # The database does not check the names, so that a release can add one.
        StrEnum: enum_column(StrEnum, "name", is_checked=False),
    }


TenantId = Annotated[str, mapped_column(ForeignKey("tenants.id", ondelete="RESTRICT"))]
Serial = Annotated[
    int,
    mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    ),
]
