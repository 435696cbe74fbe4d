"""Rate limit headers that the clients of OpenAI and Fireworks read, and the remaining money."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Final

from gateway.quota.replies import Admitted, Meter, Refused, SeesUse, sees_all
from gateway.tenancy.limits import LimitName
from gateway.tenancy.usage_record import MICRO

WINDOW_MS: Final = 60_250
"""A minute and one slot of the window: after this time, all current usage has left the window."""

_FAMILIES: Final = (
    ("requests", (LimitName.REQUESTS_PER_MINUTE,)),
    ("tokens", (LimitName.TOKENS_PER_MINUTE,)),
    (
        "tokens",
        (LimitName.PROMPT_TOKENS_PER_MINUTE, LimitName.COMPLETION_TOKENS_PER_MINUTE),
    ),
)
"""Limits that provide `x-ratelimit-*-FAMILY`; the first one that is set represents its family."""

_DETAILS: Final = (
    ("tokens-prompt", LimitName.PROMPT_TOKENS_PER_MINUTE),
    ("tokens-generated", LimitName.COMPLETION_TOKENS_PER_MINUTE),
)

_FAMILY_OF_DAY: Final = {
    LimitName.REQUESTS_PER_DAY: "requests",
    LimitName.TOKENS_PER_DAY: "tokens",
}
_MONEY: Final = (LimitName.BUDGET, None)
_remaining_of = attrgetter("remaining")


def headers_of(reply: Admitted | Refused, sees: SeesUse = sees_all) -> dict[str, str]:
    """Return the headers of an admitted or rejected request; empty if no limit applies.

    They show the tightest limit among key, project and tenant, and for money the tightest that the
    caller may see. The headers of a rejection show the limit that rejected the request.
    """
    tightest = _tightest(reply.meters, sees)
    headers: dict[str, str] = {}
    if not reply.meters and isinstance(reply, Admitted):
        return headers
    for family, names in reversed(_FAMILIES):
        if meter := _least(tightest, names):
            headers |= _family(family, meter)
    for suffix, name in _DETAILS:
        if meter := tightest.get(name):
            headers |= _limit_and_remaining(suffix, meter.value, meter.remaining)
    if money := _least(tightest, _MONEY):
        headers["x-budget-remaining"] = dollars(money.remaining)
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


def _tightest(meters: Iterable[Meter], sees: SeesUse) -> dict[LimitName | None, Meter]:
    """Return the meter of each limit with the least remaining quota."""
    tightest: dict[LimitName | None, Meter] = {}
    for meter in meters:
        subject, limit, remaining = meter
        known = tightest.get(limit)
        if (known is None or remaining < known.remaining) and (
            limit not in _MONEY or sees(subject.scope)
        ):
            tightest[limit] = meter
    return tightest


def _least(
    tightest: Mapping[LimitName | None, Meter], names: Sequence[LimitName | None]
) -> Meter | None:
    known = [tightest[name] for name in names if name in tightest]
    return min(known, key=_remaining_of, default=None)


def _family(family: str, meter: Meter) -> dict[str, str]:
    limit, remaining = meter.value, meter.remaining
    headers = _limit_and_remaining(family, limit, remaining)
    headers[f"x-ratelimit-reset-{family}"] = duration(0 if remaining == limit else WINDOW_MS)
    return headers


def _refusing(refused: Refused) -> dict[str, str]:
    family = _family_of(refused.limit)
    if family is None or refused.is_too_large or refused.retry_ms is None:
        return {}
    remaining = max(refused.value - refused.used, 0)
    return _limit_and_remaining(family, refused.value, remaining) | {
        f"x-ratelimit-reset-{family}": duration(refused.retry_ms)
    }


def _family_of(limit: LimitName | None) -> str | None:
    if limit in _FAMILY_OF_DAY:
        return _FAMILY_OF_DAY[limit]
    return next((family for family, names in _FAMILIES if limit in names), None)


def _limit_and_remaining(suffix: str, limit: int, remaining: int) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{suffix}": str(limit),
        f"x-ratelimit-remaining-{suffix}": str(remaining),
    }
