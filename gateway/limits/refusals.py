"""API errors for requests that a limit rejects."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import methodcaller
from typing import Final

from gateway.limits.headers import dollars, headers_of
from gateway.limits.replies import Refused, SeesUse, sees_all
from gateway.records.errors import InsufficientQuotaError, RateLimitError, RefusingLimit
from gateway.records.limits import LimitName, LimitScope, Spending, SpendScope
from gateway.records.scopes import Scope

CREDIT: Final = "credit_micros"
"""Name of the prepaid credit among the limits."""

_CODES: Final = {
    LimitName.REQUESTS_PER_MINUTE: "requests",
    LimitName.REQUESTS_PER_DAY: "requests",
    LimitName.AUDIO_SECONDS_PER_DAY: "audio_seconds",
    LimitName.CONCURRENT_REQUESTS: "concurrency",
    LimitName.STORED_BYTES: "stored_bytes",
}
_MAX_TOKENS: Final = "'max_tokens'"
_PROMPT_ADVICE: Final = "Shorten the prompt."
_COMPLETION_ADVICE: Final = f"Lower {_MAX_TOKENS}, 'n' or 'best_of'."
_ADVICE: Final = {
    LimitName.TOKENS_PER_MINUTE: f"{_COMPLETION_ADVICE} {_PROMPT_ADVICE}",
    LimitName.TOKENS_PER_DAY: f"{_COMPLETION_ADVICE} {_PROMPT_ADVICE}",
    LimitName.PROMPT_TOKENS_PER_MINUTE: _PROMPT_ADVICE,
    LimitName.COMPLETION_TOKENS_PER_MINUTE: _COMPLETION_ADVICE,
    LimitName.AUDIO_SECONDS_PER_DAY: "Shorten the audio.",
    LimitName.STORED_BYTES: _PROMPT_ADVICE,
}


def refusal_error(
    refused: Refused,
    *,
    is_openai: bool,
    is_anthropic: bool = False,
    max_tokens_param: str = "max_tokens",
    sees: SeesUse = sees_all,
) -> RateLimitError | InsufficientQuotaError:
    """Return the error of a rejection, whose headers may be Anthropic's.

    Lack of money has a separate status in the OpenAI dialect.

    The message contains amounts of money only if the caller may see them. It calls `max_tokens` by
    the client's name.
    """
    headers = headers_of(refused, sees, is_anthropic=is_anthropic)
    rename = methodcaller("replace", _MAX_TOKENS, f"'{max_tokens_param}'")
    if refused.limit is None or refused.limit is LimitName.BUDGET:
        return _money_error(refused, rename, headers, is_openai=is_openai, sees=sees)
    return RateLimitError(
        rename(_rate_message(refused, refused.limit)),
        refusing=_refusing_limit(refused),
        code=_CODES.get(refused.limit, "tokens"),
        is_retryable=not refused.is_too_large,
        headers=headers,
    )


def _money_error(
    refused: Refused,
    rename: Callable[[str], str],
    headers: Mapping[str, str],
    *,
    is_openai: bool,
    sees: SeesUse,
) -> InsufficientQuotaError:
    is_credit = refused.limit is None
    refusing = _refusing_limit(refused)
    if sees(refused.subject.scope):
        message = _credit_message(refused) if is_credit else _budget_message(refused)
    elif refused.subject.spending is not None:
        message = (
            f"The {_spend_limit(refused, refused.subject.spending)} does not allow the request, "
            f"which may cost {dollars(refused.wanted)} dollars."
        )
        refusing = replace(refusing, limit_value=None, used=None)
    else:
        message = _hidden_message(refused)
        refusing = replace(refusing, limit_value=None, used=None)
    return InsufficientQuotaError(
        rename(message),
        refusing=refusing,
        code="insufficient_credits" if is_credit else "budget_exceeded",
        is_openai=is_openai,
        headers=headers,
    )


def _refusing_limit(refused: Refused) -> RefusingLimit:
    return RefusingLimit(
        limit=_name_of(refused),
        scope=_scope_of(refused).value,
        limit_value=refused.value,
        used=refused.used,
        reset_seconds=None if refused.retry_ms is None else refused.retry_ms / 1000,
    )


def _name_of(refused: Refused) -> str:
    spending = refused.subject.spending
    if refused.limit is None:
        return CREDIT
    if spending is not None and refused.limit is LimitName.BUDGET:
        return f"spend_limit_{spending.window}"
    return refused.limit.value


def _rate_message(refused: Refused, limit: LimitName) -> str:
    name = f"{refused.value} {limit.replace('_', ' ')}"
    if refused.is_too_large:
        advice = _ADVICE.get(limit, "The limit allows no requests.")
        return (
            f"The request needs {refused.wanted}, which exceeds the limit of {name} "
            f"of {_holder(refused)}. {advice}"
        )
    if limit is LimitName.CONCURRENT_REQUESTS:
        return (
            f"The limit of {name} of {_holder(refused)} is reached. "
            "Retry when one of them has ended."
        )
    if limit is LimitName.STORED_BYTES:
        return (
            f"The limit of {name} of {_holder(refused)} is reached{_shortage(refused)}. "
            "Retry when requests have ended or stored responses have expired."
        )
    return (
        f"The limit of {name} of {_holder(refused)} is reached{_shortage(refused)}. "
        f"It resets {_in_seconds(refused)}."
    )


def _budget_message(refused: Refused) -> str:
    amount = f"of {dollars(refused.value)} dollars"
    if refused.subject.spending is None:
        name, budget = "budget", f"monthly budget {amount} of {_holder(refused)}"
    else:
        name, budget = "spend limit", _spend_limit(refused, refused.subject.spending, amount)
    return (
        f"The {budget} does not "
        f"allow the request: {dollars(refused.used)} are used or reserved, and the request may "
        f"cost {dollars(refused.wanted)}. The {name} resets {_in_seconds(refused)}."
        f"{_advice(refused)}"
        if refused.retry_ms is not None
        else f"The request may cost {dollars(refused.wanted)} dollars, which exceeds the {budget}. "
        f"{_COMPLETION_ADVICE}"
    )


def _advice(refused: Refused) -> str:
    spending = refused.subject.spending
    if spending is None or not spending.is_automatic:
        return ""
    path = f"/v1/spend_limits/{spending.limit_id}/lift"
    return f" It was learned from the key's last four weeks; POST {path} lifts it for a day."


def _spend_limit(refused: Refused, spending: Spending, amount: str = "") -> str:
    model = "" if spending.model is None else f" for the model '{spending.model}'"
    holder = f"{spending.scope} '{refused.subject.id}'"
    learned = "usual " if spending.is_automatic else ""
    return (
        f"{learned}spend limit{amount and ' '}{amount} per {spending.window} of the {holder}{model}"
    )


def _hidden_message(refused: Refused) -> str:
    money = "credit" if refused.limit is None else "budget"
    return (
        f"The {money} of {_holder(refused)} does not allow the request, which may cost "
        f"{dollars(refused.wanted)} dollars. The remaining amount is visible with the scope "
        f"'{Scope.USAGE}' in the {refused.subject.scope.value}."
    )


def _credit_message(refused: Refused) -> str:
    left = max(refused.value - refused.used, 0)
    return (
        f"The credit of {_holder(refused)} is insufficient: {dollars(left)} dollars remain, and "
        f"the request may cost {dollars(refused.wanted)}. Buy credits or "
        f"lower {_MAX_TOKENS}."
    )


def _holder(refused: Refused) -> str:
    return f"the {_scope_of(refused).value} '{refused.subject.id}'"


def _scope_of(refused: Refused) -> LimitScope | SpendScope:
    subject = refused.subject
    return subject.scope if subject.spending is None else subject.spending.scope


def _shortage(refused: Refused) -> str:
    left = refused.value - refused.used
    if left <= 0 or refused.wanted == 1:
        return ""
    return f": {left} remain, and the request needs {refused.wanted}"


def _in_seconds(refused: Refused) -> str:
    milliseconds = refused.retry_ms or 0
    # Round up to tenths, for the same reason as the header.
    return f"in {-(-milliseconds // 100) / 10:.1f} s"
