"""Rate limit headers that the clients of OpenAI and Fireworks read, and the remaining money."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

from gateway.limits.replies import METERED, NO_LIMIT, Admitted, Refused, SeesUse, sees_all
from gateway.records.limits import LimitName, LimitScope, SubjectLimits
from gateway.records.usage_record import MICRO

WINDOW_MS: Final = 60_250
"""A minute and one slot of the window: after this time, all current usage has left the window."""

_FAMILIES: Final = (
    ("requests", ((LimitName.REQUESTS_PER_MINUTE,),)),
    (
        "tokens",
        (
            (LimitName.TOKENS_PER_MINUTE,),
            (LimitName.PROMPT_TOKENS_PER_MINUTE, LimitName.COMPLETION_TOKENS_PER_MINUTE),
        ),
    ),
)
"""Limits that provide `x-ratelimit-*-FAMILY`: the first of these groups in which one is set."""

_DETAILS: Final = (
    ("tokens-prompt", LimitName.PROMPT_TOKENS_PER_MINUTE),
    ("tokens-generated", LimitName.COMPLETION_TOKENS_PER_MINUTE),
)

_FAMILY_OF_DAY: Final = {
    LimitName.REQUESTS_PER_DAY: "requests",
    LimitName.TOKENS_PER_DAY: "tokens",
}
_MONEY: Final = (LimitName.BUDGET, None)


class _Shown(NamedTuple):
    """The headers of one minute limit, and where its remainders are."""

    limit_header: str
    remaining_header: str
    reset_header: str | None
    places: Mapping[int, int]
    """Index of a remainder -> the limit; at least one."""


def headers_of(reply: Admitted | Refused, sees: SeesUse = sees_all) -> dict[str, str]:
    """Return the headers of an admitted or rejected request; empty if no limit applies.

    They show the tightest limit among key, project and tenant, and for money the tightest that the
    caller may see. The headers of a rejection show the limit that rejected the request.
    """
    subjects, left = reply.remaining
    limits, money = _shown(subjects)
    headers: dict[str, str] = {}
    for limit_header, remaining_header, reset_header, places in limits:
        at = min(places, key=left.__getitem__)
        limit, remaining = places[at], left[at]
        headers[limit_header] = str(limit)
        headers[remaining_header] = str(remaining)
        if reset_header is not None:
            headers[reset_header] = duration(0 if remaining == limit else WINDOW_MS)
    balances = [left[at] for at, scope in money if left[at] != NO_LIMIT and sees(scope)]
    if balances:
        headers["x-budget-remaining"] = dollars(min(balances))
    if isinstance(reply, Refused):
        headers |= _refusing(reply)
    return headers


@lru_cache(maxsize=16)  # Most are one of two.
def duration(milliseconds: int) -> str:
    """Format a duration as Go does: `250ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest // 1000}.{rest % 1000:03}".rstrip("0").rstrip(".") + "s"
    if minutes == 0:
        return seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"


def dollars(micros: int) -> str:
    """Format micro-dollars as an exact decimal number of dollars: `12.5`."""
    whole, rest = divmod(abs(micros), MICRO)
    text = f"{whole}.{rest:06}".rstrip("0").rstrip(".")
    return f"-{text}" if micros < 0 else text


@lru_cache(maxsize=10_000)
def _shown(
    subjects: tuple[SubjectLimits, ...],
) -> tuple[tuple[_Shown, ...], tuple[tuple[int, LimitScope], ...]]:
    """Return the minute limits to show, and the indexes and scopes of money that may remain."""
    shown = []
    for family, groups in _FAMILIES:
        found = (_places(subjects, names) for names in groups)
        if places := next(filter(None, found), None):
            shown.append(_Shown(*_names(family), f"x-ratelimit-reset-{family}", places))
    for suffix, name in _DETAILS:
        if places := _places(subjects, (name,)):
            shown.append(_Shown(*_names(suffix), None, places))
    money = [
        (number * len(METERED) + METERED.index(name), subject.scope)
        for number, subject in enumerate(subjects)
        for name in _MONEY
    ]
    return tuple(shown), tuple(money)


def _places(subjects: tuple[SubjectLimits, ...], names: Iterable[LimitName]) -> dict[int, int]:
    return {
        number * len(METERED) + METERED.index(name): limit
        for name in names
        for number, subject in enumerate(subjects)
        if (limit := subject.limits.get(name)) is not None
    }


def _names(suffix: str) -> tuple[str, str]:
    return f"x-ratelimit-limit-{suffix}", f"x-ratelimit-remaining-{suffix}"


def _refusing(refused: Refused) -> dict[str, str]:
    family = _family_of(refused.limit)
    if family is None or refused.is_too_large or refused.retry_ms is None:
        return {}
    limit_header, remaining_header = _names(family)
    return {
        limit_header: str(refused.value),
        remaining_header: str(max(refused.value - refused.used, 0)),
        f"x-ratelimit-reset-{family}": duration(refused.retry_ms),
    }


def _family_of(limit: LimitName | None) -> str | None:
    if limit in _FAMILY_OF_DAY:
        return _FAMILY_OF_DAY[limit]
    return next((family for family, groups in _FAMILIES if limit in chain(*groups)), None)
