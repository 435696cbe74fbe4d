"""Rate limit headers that the clients of OpenAI, Fireworks and Anthropic read, and the remaining
money.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

from common import clock
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

_ANTHROPIC_FAMILIES: Final = {
    "tokens-prompt": "input-tokens",
    "tokens-generated": "output-tokens",
}
"""The names of families that Anthropic calls otherwise."""

_DETAILS: Final = (
    ("tokens-prompt", LimitName.PROMPT_TOKENS_PER_MINUTE),
    ("tokens-generated", LimitName.COMPLETION_TOKENS_PER_MINUTE),
)

_FAMILY_OF_DAY: Final = {
    LimitName.REQUESTS_PER_DAY: "requests",
    LimitName.TOKENS_PER_DAY: "tokens",
    LimitName.AUDIO_SECONDS_PER_DAY: "audio-seconds",
}
_MONEY: Final = (LimitName.BUDGET, None)


class _Shown(NamedTuple):
    """The headers of one minute limit, and where its remainders are."""

    limit_header: str
    remaining_header: str
    reset_header: str | None
    places: Mapping[int, int]
    """Index of a remainder -> the limit; at least one."""


def headers_of(
    reply: Admitted | Refused, sees: SeesUse = sees_all, *, is_anthropic: bool = False
) -> dict[str, str]:
    """Return the headers of an admitted or rejected request; empty if no limit applies.

    They show the tightest limit among key, project and tenant, and for money the tightest that the
    caller may see. The headers of a rejection show the limit that rejected the request.
    """
    subjects, left = reply.remaining
    limits, money = _shown(subjects, is_anthropic)
    shown = _time_after if is_anthropic else duration
    headers: dict[str, str] = {}
    for limit_header, remaining_header, reset_header, places in limits:
        at = min(places, key=left.__getitem__)
        limit, remaining = places[at], left[at]
        headers[limit_header] = str(limit)
        headers[remaining_header] = str(remaining)
        if reset_header is not None:
            headers[reset_header] = shown(0 if remaining == limit else WINDOW_MS)
    balances = [left[at] for at, scope in money if left[at] != NO_LIMIT and sees(scope)]
    if balances:
        headers["x-budget-remaining"] = dollars(min(balances))
    if isinstance(reply, Refused):
        headers |= _refusing(reply, is_anthropic)
    return headers


def _time_after(milliseconds: int) -> str:
    """Return the time after a duration, in RFC 3339."""
    seconds = -(-(clock.now_ms() + milliseconds) // 1000)
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


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
    is_anthropic: bool,  # noqa: FBT001 - in the cache's key
) -> tuple[tuple[_Shown, ...], tuple[tuple[int, LimitScope], ...]]:
    """Return the minute limits to show, and the indexes and scopes of money that may remain."""
    shown = []
    for family, groups in _FAMILIES:
        found = (_places(subjects, names) for names in groups)
        if places := next(filter(None, found), None):
            shown.append(_Shown(*_names(family, is_anthropic), places))
    for suffix, name in _DETAILS:
        if places := _places(subjects, (name,)):
            limit, remaining, reset = _names(suffix, is_anthropic)
            shown.append(_Shown(limit, remaining, reset if is_anthropic else None, places))
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


def _names(family: str, is_anthropic: bool) -> tuple[str, str, str]:  # noqa: FBT001
    """Return the headers of a family: the limit, what remains, and when all of it does."""
    parts = ("limit", "remaining", "reset")
    if is_anthropic:
        family = _ANTHROPIC_FAMILIES.get(family, family)
        limit, remaining, reset = (f"anthropic-ratelimit-{family}-{part}" for part in parts)
    else:
        limit, remaining, reset = (f"x-ratelimit-{part}-{family}" for part in parts)
    return limit, remaining, reset


def _refusing(refused: Refused, is_anthropic: bool) -> dict[str, str]:  # noqa: FBT001
    family = _family_of(refused.limit)
    if family is None or refused.is_too_large or refused.retry_ms is None:
        return {}
    limit_header, remaining_header, reset_header = _names(family, is_anthropic)
    shown = _time_after if is_anthropic else duration
    return {
        limit_header: str(refused.value),
        remaining_header: str(max(refused.value - refused.used, 0)),
        reset_header: shown(refused.retry_ms),
    }


def _family_of(limit: LimitName | None) -> str | None:
    if limit in _FAMILY_OF_DAY:
        return _FAMILY_OF_DAY[limit]
    return next((family for family, groups in _FAMILIES if limit in chain(*groups)), None)
