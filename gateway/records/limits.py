"""Limits of keys, projects and tenants, and the plans with their defaults."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, NamedTuple

from typing_extensions import override

from contract.messages import WHOLE_MODEL
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
    AUDIO_SECONDS_PER_DAY = "audio_seconds_per_day"
    CONCURRENT_REQUESTS = "concurrent_requests"
    BUDGET = "budget_micros"  # Micro-dollars in a calendar month.
    STORED_BYTES = "stored_bytes"  # Of waiting and running requests, and of stored responses.
    BATCH_TOKENS = "batch_tokens"  # The most tokens of batches that have not ended.
    MODEL_SHARE = "model_share_percent"  # Of the sequences and the KV cache of each engine.


RESERVED_LIMITS: Final[tuple[LimitName, ...]] = tuple(
    name
    for name in LimitName
    if name not in (LimitName.STORED_BYTES, LimitName.BATCH_TOKENS, LimitName.MODEL_SHARE)
)
"""Limits in which every request reserves its maximum usage.

`gateway.limits.stored_bytes`, `gateway.batches` and the queue count the others.
"""


def names_of(scope: LimitScope) -> list[LimitName]:
    """Return the limits that a holder can have: only tenants have a share of a model."""
    is_tenant = scope is LimitScope.TENANT
    return [name for name in LimitName if is_tenant or name is not LimitName.MODEL_SHARE]


def range_of(name: LimitName) -> tuple[int, int]:
    """Return the lowest and highest value of a limit."""
    return (1, WHOLE_MODEL) if name is LimitName.MODEL_SHARE else (0, MAX_LIMIT)


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
    audio_seconds_per_day: int | None = None
    concurrent_requests: int | None = None
    budget_micros: int | None = None
    stored_bytes: int | None = None
    batch_tokens: int | None = None
    model_share_percent: int | None = None

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
            and self.audio_seconds_per_day is None
            and self.budget_micros is None
        )

    def body(self) -> dict[str, int | None]:
        """Return all limits by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def subject_of(scope: LimitScope, id_: str) -> str:
    """Return the name in Redis of a holder of limits, such as `t:acme`."""
    return f"{scope[0]}:{id_}"


SPENDING: Final = "s:"
"""Begins the names of spend limits in Redis."""
JWT_PREFIX: Final = "jwt:"
"""Before the subject of a token, in the id of a credential."""


class SpendScope(StrEnum):
    """What a spend limit counts."""

    KEY = "key"
    MEMBER = "member"  # Requests with the JWTs of a person.
    PROJECT = "project"
    TENANT = "tenant"
    USER = "user"  # An end user, as requests name it.


def credential_of(scope: SpendScope, holder: str | None) -> str | None:
    """Return the credential whose requests a spend limit counts; None: of any."""
    if scope is SpendScope.MEMBER:
        return f"{JWT_PREFIX}{holder}"
    return holder if scope is SpendScope.KEY else None


def may_count(
    scope: SpendScope, holder: str | None, credential_id: str, project_id: str | None
) -> bool:
    """Return whether a spend limit counts requests of a credential, of some model and end user."""
    if scope is SpendScope.PROJECT:
        return holder == project_id
    return credential_of(scope, holder) in (None, credential_id)


class Window(StrEnum):
    """The time in which a spend limit counts."""

    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Bounds(NamedTuple):
    """Unix times in seconds at which the windows around a moment begin."""

    before: int
    start: int
    end: int
    after: int
    """When the next window ends."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What a spend limit counts, in the windows around a moment."""

    limit_id: str
    scope: SpendScope
    holder: str | None
    """Id of the key or project, subject of the member, or end user."""
    model: str | None
    """Full name of a model or adapter; None: all models."""
    window: Window
    bounds: Bounds
    user: str = ""
    """The end user; empty unless this limits one."""
    is_automatic: bool = False
    """Whether it was learned from what the key usually spends."""

    @property
    def subject(self) -> str:
        """The name in Redis. The name of an end user contains a slash."""
        if not self.user:
            return f"{SPENDING}{self.limit_id}"
        return (
            f"{SPENDING}{self.limit_id}/{blake2b(self.user.encode(), digest_size=12).hexdigest()}"
        )

    def window_at(self, unix_ms: int) -> tuple[int, int] | None:
        """Return when a known window at this time begins and ends, in seconds."""
        for start, end in pairwise(self.bounds):
            if start * 1000 <= unix_ms < end * 1000:
                return start, end
        return None


@dataclass(frozen=True, slots=True)
class SubjectLimits:
    """One holder of limits, and the limits that apply to it."""

    scope: LimitScope
    id: str
    limits: Limits
    spending: Spending | None = None
    """What counts, if this is a spend limit: its amount is the budget in `limits`."""

    @property
    def subject(self) -> str:
        """The holder's name in Redis: `t:acme`."""
        return subject_of(self.scope, self.id) if self.spending is None else self.spending.subject

    @property
    def has_credit(self) -> bool:
        """Whether it pays for prepaid requests."""
        return self.scope is LimitScope.TENANT and self.spending is None


class Subjects(tuple[SubjectLimits, ...]):  # noqa: SLOT001 - it has its hash
    """Holders of limits, whose hash is computed once: several caches look for them in a request."""

    _hash: int

    @override
    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


def model_share_of(subjects: Iterable[SubjectLimits]) -> int:
    """Return the most percent of an engine that jobs of the tenant among these holders may use."""
    shares = (each.limits.model_share_percent for each in subjects)
    return min((each for each in shares if each is not None), default=WHOLE_MODEL)


def read_limits(
    values: Mapping[str, Any], scope: LimitScope, *, param: str = "limits"
) -> dict[LimitName, int | None]:
    """Validate limits in user input. Raises InvalidParameterError that names the invalid one."""
    return {_name(name, scope, param): _value(name, value, param) for name, value in values.items()}


def read_limit_changes(
    values: Mapping[str, Any], scope: LimitScope = LimitScope.TENANT
) -> dict[LimitName, int | FromPlan | None]:
    """Validate a change of limits in user input; "plan" removes the holder's own limit.

    Raises InvalidParameterError.
    """
    return {
        _name(name, scope, "limits"): FromPlan.FROM_PLAN
        if value == FromPlan.FROM_PLAN.value
        else _value(name, value, "limits")
        for name, value in values.items()
    }


def changed_limits(own: LimitValues, changes: LimitChanges) -> dict[LimitName, int | None]:
    """Return a holder's own limits after a change."""
    merged = {**own, **changes}
    return {name: value for name, value in merged.items() if not isinstance(value, FromPlan)}


def _name(name: str, scope: LimitScope, param: str) -> LimitName:
    known = names_of(scope)
    if name in known:
        return LimitName(name)
    if name in list(LimitName):
        path = f"{param}.{name}"
        raise InvalidParameterError(f"'{path}' is a limit of tenants only.", param=path)
    raise InvalidParameterError(
        f"'{param}' has no member {shown(name)}. Known: {', '.join(known)}.", param=param
    )


def _value(name: str, value: Any, param: str) -> int | None:
    if value is None:
        return None
    least, most = range_of(LimitName(name))
    if type(value) is not int or not least <= value <= most:
        raise must(f"{param}.{name}", f"be null or an integer from {least} to {most}", value)
    return value
