"""Rate limit headers, and the errors of refusals."""

from gateway.limits.headers import dollars, duration, headers_of
from gateway.limits.refusals import refusal_error
from gateway.limits.replies import Admitted, Refused, Remaining, sees_all, sees_key
from gateway.records.errors import ErrorStyle, InsufficientQuotaError, RateLimitError, RefusingLimit
from gateway.records.limits import LimitName, SubjectLimits
from tests.gateway.limits.building import NOON, key_of, project_of, remaining, tenant_of
from tests.support.cases import all_cases

NAMES = {name.value: 100 for name in LimitName}
NOTHING = Remaining((), ())


def refused(
    limit: LimitName | None,
    *,
    subject: SubjectLimits | None = None,
    value: int = 100,
    used: int = 100,
    wanted: int = 1,
    retry_ms: int | None = None,
    left: Remaining = NOTHING,
) -> Refused:
    one = subject or key_of(**NAMES)
    return Refused(one, limit, value, used, wanted, retry_ms, left)


@all_cases(
    ("milliseconds", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (250, "250ms"),
        (999, "999ms"),
        (1000, "1s"),
        (1500, "1.5s"),
        (60_250, "1m0.25s"),
        (360_000, "6m0s"),
        (3_599_999, "59m59.999s"),
        (3_600_000, "1h0m0s"),
        (86_400_001, "24h0m0.001s"),
    ],
)
def test_durations_have_the_format_of_go(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text


@all_cases(
    ("micros", "text"),
    [(0, "0"), (1, "0.000001"), (1_500_000, "1.5"), (10_000_000, "10"), (-20, "-0.00002")],
)
def test_money_is_exact(micros: int, text: str) -> None:
    assert dollars(micros) == text
    assert dollars(10**15 + 1) == "1000000000.000001"


def test_headers_without_limits_are_empty() -> None:
    assert headers_of(Admitted(NOON, NOTHING)) == {}


def test_tightest_limit_of_key_project_and_tenant_is_reported() -> None:
    key = key_of(requests_per_minute=50, tokens_per_minute=1000)
    tenant = tenant_of(requests_per_minute=60, tokens_per_minute=5000, budget_micros=10)
    left = remaining(
        {
            key: {LimitName.REQUESTS_PER_MINUTE: 49, LimitName.TOKENS_PER_MINUTE: 900},
            tenant: {
                LimitName.REQUESTS_PER_MINUTE: 7,
                LimitName.TOKENS_PER_MINUTE: 4000,
                LimitName.BUDGET: 2_500_000,
                None: 1_250_000,
            },
        }
    )
    assert headers_of(Admitted(NOON, left)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "7",
        "x-ratelimit-reset-requests": "1m0.25s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "1m0.25s",
        "x-budget-remaining": "1.25",
    }


def test_prompt_and_completion_limits_fill_token_headers_without_a_token_limit() -> None:
    project = project_of(prompt_tokens_per_minute=40, completion_tokens_per_minute=30)
    values: dict[LimitName | None, int] = {
        LimitName.PROMPT_TOKENS_PER_MINUTE: 40,
        LimitName.COMPLETION_TOKENS_PER_MINUTE: 5,
    }
    assert headers_of(Admitted(NOON, remaining({project: values}))) == {
        "x-ratelimit-limit-tokens": "30",
        "x-ratelimit-remaining-tokens": "5",
        "x-ratelimit-reset-tokens": "1m0.25s",
        "x-ratelimit-limit-tokens-prompt": "40",
        "x-ratelimit-remaining-tokens-prompt": "40",
        "x-ratelimit-limit-tokens-generated": "30",
        "x-ratelimit-remaining-tokens-generated": "5",
    }
    other = project_of(prompt_tokens_per_minute=40)
    left = remaining({other: {LimitName.PROMPT_TOKENS_PER_MINUTE: 40}})
    unused = headers_of(Admitted(NOON, left))
    assert unused["x-ratelimit-reset-tokens"] == "0s"


def test_refusal_reports_the_limit_that_refused_instead_of_the_tightest() -> None:
    tenant = tenant_of(requests_per_minute=60)
    left = remaining({tenant: {LimitName.REQUESTS_PER_MINUTE: 3}})
    answer = refused(LimitName.REQUESTS_PER_DAY, retry_ms=3_600_000, left=left)
    assert headers_of(answer) == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1h0m0s",
    }


def test_refusal_by_a_rate_has_a_correct_retry_time() -> None:
    answer = refused(LimitName.REQUESTS_PER_MINUTE, value=50, used=50, retry_ms=12_301)
    error = refusal_error(answer, is_openai=True)
    assert isinstance(error, RateLimitError)
    assert error.status_for(ErrorStyle.OPENAI) == 429
    assert error.body() == {
        "error": {
            "message": "The limit of 50 requests per minute of the key 'key_ab' is reached. "
            "It resets in 12.4 s.",
            "type": "rate_limit_error",
            "param": None,
            "code": "requests",
            "limit": "requests_per_minute",
            "scope": "key",
            "limit_value": 50,
            "used": 50,
            "reset_seconds": 12.301,
        }
    }
    assert error.headers() == {
        "x-ratelimit-limit-requests": "50",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "12.301s",
        "x-should-retry": "true",
        "retry-after": "13",
        "retry-after-ms": "12301",
    }


def test_retry_headers_are_never_early() -> None:
    for milliseconds in range(1, 70_000, 7):
        answer = refused(LimitName.TOKENS_PER_MINUTE, retry_ms=milliseconds)
        headers = refusal_error(answer, is_openai=False).headers()
        assert int(headers["retry-after-ms"]) == milliseconds
        assert milliseconds <= int(headers["retry-after"]) * 1000 < milliseconds + 1000


@all_cases(
    "limit",
    [name for name in LimitName if name not in (LimitName.BUDGET, LimitName.BATCH_TOKENS)],
)
@all_cases("is_too_large", [False, True])
def test_every_limit_has_a_readable_message(limit: LimitName, is_too_large: bool) -> None:
    wanted = 101 if is_too_large else 40
    answer = refused(limit, used=70, wanted=wanted, retry_ms=None if is_too_large else 1000)
    error = refusal_error(answer, is_openai=False)
    assert error.code in ("requests", "tokens", "audio_seconds", "concurrency", "stored_bytes")
    assert "the key 'key_ab'" in error.message
    assert "100" in error.message
    assert "  " not in error.message
    assert error.body()["error"]["limit"] == limit.value
    assert error.headers()["x-should-retry"] == ("false" if is_too_large else "true")
    assert ("retry-after" in error.headers()) is not is_too_large
    assert ("exceeds the limit" in error.message) is is_too_large


def test_too_large_request_gets_the_parameter_to_lower() -> None:
    answer = refused(LimitName.COMPLETION_TOKENS_PER_MINUTE, used=0, wanted=4096)
    error = refusal_error(answer, is_openai=False, max_tokens_param="n_predict")
    assert error.message == (
        "The request needs 4096, which exceeds the limit of 100 completion tokens per minute "
        "of the key 'key_ab'. Lower 'n_predict', 'n' or 'best_of'."
    )


def test_full_concurrency_may_be_retried_without_a_time() -> None:
    error = refusal_error(refused(LimitName.CONCURRENT_REQUESTS), is_openai=False)
    assert error.code == "concurrency"
    assert error.headers() == {"x-should-retry": "true"}
    assert error.body()["error"]["reset_seconds"] is None


@all_cases(
    ("is_openai", "status", "code"),
    [(False, 402, "budget_exceeded"), (True, 429, "insufficient_quota")],
)
def test_exceeded_budget_has_the_status_of_the_dialect(
    is_openai: bool, status: int, code: str
) -> None:
    answer = refused(
        LimitName.BUDGET, value=2_000_000, used=1_900_000, wanted=150_000, retry_ms=86_400_000
    )
    error = refusal_error(answer, is_openai=is_openai)
    assert isinstance(error, InsufficientQuotaError)
    assert error.status_for(ErrorStyle.OPENAI) == error.status == status
    body = error.body()["error"]
    assert (body["type"], body["code"]) == ("insufficient_quota", code)
    assert (body["limit"], body["reset_seconds"]) == ("budget_micros", 86_400.0)
    assert error.headers() == {"x-should-retry": "false"}
    assert "1.9 are used" in error.message
    assert "may cost 0.15" in error.message


def test_request_above_the_whole_budget_is_reported_as_such() -> None:
    answer = refused(LimitName.BUDGET, value=2_000_000, used=0, wanted=2_000_001)
    assert (
        "exceeds the monthly budget of 2 dollars" in refusal_error(answer, is_openai=False).message
    )


def test_lack_of_credit_is_reported_with_the_balance() -> None:
    tenant = tenant_of()
    answer = refused(
        None, subject=tenant, value=500, used=600, wanted=10, left=remaining({tenant: {None: 0}})
    )
    error = refusal_error(answer, is_openai=False)
    body = error.body()["error"]
    assert (error.status, body["code"], body["scope"]) == (402, "insufficient_credits", "tenant")
    assert body["limit"] == "credit_micros"
    assert error.headers() == {"x-budget-remaining": "0", "x-should-retry": "false"}
    assert "0 dollars remain" in error.message


def test_money_of_the_tenant_is_hidden_from_credentials_of_one_key() -> None:
    key, tenant = key_of(budget_micros=9), tenant_of(budget_micros=1_900_000)
    budgets = remaining({key: {LimitName.BUDGET: 5}, tenant: {LimitName.BUDGET: 3}})
    for sees, left in ((sees_all, "0.000003"), (sees_key, "0.000005")):
        assert headers_of(Admitted(NOON, budgets), sees) == {"x-budget-remaining": left}
    credit = remaining({tenant: {None: 3}})
    assert headers_of(Admitted(NOON, credit), sees_key) == {}
    for limit in (LimitName.BUDGET, None):
        answer = refused(
            limit, subject=tenant, value=1_900_000, used=1_800_000, wanted=250_000, left=credit
        )
        error = refusal_error(answer, is_openai=False, sees=sees_key)
        body = error.body()["error"]
        assert (error.status, body["limit_value"], body["used"]) == (402, None, None)
        assert error.headers() == {"x-should-retry": "false"}
        assert "1.9" not in error.message
        assert "1.8" not in error.message
        assert "may cost 0.25" in error.message


@all_cases("style", ErrorStyle)
def test_limit_is_in_the_error_of_every_style(style: ErrorStyle) -> None:
    refusing = RefusingLimit(
        limit="requests_per_day", scope="tenant", limit_value=5, used=5, reset_seconds=1.0
    )
    error = RateLimitError("No.", refusing=refusing, code="requests", is_retryable=True, headers={})
    reported = error.body(style)["error"]
    assert reported["type"]
    assert (reported["limit"], reported["scope"], reported["used"]) == (
        "requests_per_day",
        "tenant",
        5,
    )
