"""Limits of keys, projects and tenants, and the plans with their defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any, Final

from gateway.records.errors import InvalidParameterError, must, shown

MAX_LIMIT: Final = 10**15
"""Largest value of a limit: Redis scripts use doubles, which are exact up to 2**53."""


class LimitScope(StrEnum):
    """The type of holder that has a limit."""

    KEY = "key"
    PROJECT = "project"
    TENANT = "tenant"


class LimitName(StrEnum):
    """Names of limits. Minutes are any 60 seconds; days and months are UTC days and months."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"  # Prompt and completion tokens together.
    PROMPT_TOKENS_PER_MINUTE = "prompt_tokens_per_minute"
    COMPLETION_TOKENS_PER_MINUTE = "completion_tokens_per_minute"
    REQUESTS_PER_DAY = "requests_per_day"
    TOKENS_PER_DAY = "tokens_per_day"
    CONCURRENT_REQUESTS = "concurrent_requests"
    BUDGET = "budget_micros"  # Micro-dollars in a calendar month.
    STORED_BYTES = "stored_bytes"  # Of waiting and running requests, and of stored responses.
    BATCH_TOKENS = "batch_tokens"  # The most tokens of batches that have not ended.


RESERVED_LIMITS: Final[tuple[LimitName, ...]] = tuple(
    name for name in LimitName if name not in (LimitName.STORED_BYTES, LimitName.BATCH_TOKENS)
)
"""Limits in which every request reserves its maximum usage.

`gateway.limits.storage` and `gateway.batches` count the others.
"""


LimitValues = Mapping[LimitName, int | None]
"""Limits as stored: an absent limit has the plan's default, None means no limit."""


class FromPlan(Enum):
    """In a change, removes the holder's own limit, so that the plan's limit applies again."""

    FROM_PLAN = "plan"


LimitChanges = Mapping[LimitName, int | FromPlan | None]
"""A change of limits: an absent limit stays unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that apply to one holder; None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    prompt_tokens_per_minute: int | None = None
    completion_tokens_per_minute: int | None = None
    requests_per_day: int | None = None
    tokens_per_day: int | None = None
    concurrent_requests: int | None = None
    budget_micros: int | None = None
    stored_bytes: int | None = None
    batch_tokens: int | None = None

    @classmethod
    def from_values(cls, own: LimitValues, defaults: LimitValues) -> "Limits":
        """Return the holder's own limits, and the plan's limits where it has none."""
        return cls(**{name.value: value for name, value in {**defaults, **own}.items()})

    def get(self, name: LimitName) -> int | None:
        """Return one limit."""
        value: int | None = getattr(self, name)
        return value

    def reserved(self) -> tuple[int | None, ...]:
        """Return the limits in which a request reserves, in the order of RESERVED_LIMITS."""
        return tuple(map(self.get, RESERVED_LIMITS))

    @property
    def is_durable(self) -> bool:
        """Whether any limit covers a longer period than Redis can be trusted to retain."""
        return not (
            self.requests_per_day is None
            and self.tokens_per_day is None
            and self.budget_micros is None
        )

    def body(self) -> dict[str, int | None]:
        """Return all limits by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def subject_of(scope: LimitScope, id_: str) -> str:
    """Return the name in Redis of a holder of limits, such as `t:acme`."""
    return f"{scope[0]}:{id_}"


@dataclass(frozen=True, slots=True)
class SubjectLimits:
    """One holder of limits, and the limits that apply to it."""

    scope: LimitScope
    id: str
    limits: Limits

    @property
    def subject(self) -> str:
        """The holder's name in Redis: `t:acme`."""
        return subject_of(self.scope, self.id)


def read_limits(values: Mapping[str, Any], *, param: str = "limits") -> dict[LimitName, int | None]:
    """Validate limits in user input. Raises InvalidParameterError that names the invalid one."""
    return {_name(name, param): _value(name, value, param) for name, value in values.items()}


def read_limit_changes(values: Mapping[str, Any]) -> dict[LimitName, int | FromPlan | None]:
    """Validate a change of limits in user input; "plan" removes the holder's own limit.

    Raises InvalidParameterError.
    """
    return {
        _name(name, "limits"): FromPlan.FROM_PLAN
        if value == FromPlan.FROM_PLAN.value
        else _value(name, value, "limits")
        for name, value in values.items()
    }


def changed_limits(own: LimitValues, changes: LimitChanges) -> dict[LimitName, int | None]:
    """Return a holder's own limits after a change."""
    merged = {**own, **changes}
    return {name: value for name, value in merged.items() if not isinstance(value, FromPlan)}


def _name(name: str, param: str) -> LimitName:
    if name not in set(LimitName):
        raise InvalidParameterError(
            f"'{param}' has no member {shown(name)}. Known: {', '.join(LimitName)}.", param=param
        )
    return LimitName(name)


def _value(name: str, value: Any, param: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_LIMIT:
        raise must(f"{param}.{name}", f"be null or an integer from 0 to {MAX_LIMIT}", value)
    return value
