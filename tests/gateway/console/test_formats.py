"""How pages show amounts, ids and scales."""

from datetime import UTC, datetime, timedelta

import pytest

from gateway.console import formats
from gateway.console.charts import COST, TOKENS, Measure, stacked
from gateway.records.times import utc_now
from tests.support.cases import all_cases


@all_cases(
    ("micros", "shown"),
    [
        (0, "$0.00"),
        (1, "$0.000001"),
        (999_999, "$0.999999"),
        (1_000_000, "$1.00"),
        (1_234_567, "$1.23"),
        (1_235_000, "$1.24"),
        (1_999_999, "$2.00"),
        (-1_234_567, "-$1.23"),
        (1_234_567_890_123, "$1,234,567.89"),
    ],
)
def test_amounts_have_two_decimals_from_a_dollar_on(micros: int, shown: str) -> None:
    assert formats.cents(micros) == shown
    assert len(formats.padding(shown)) + len(shown.partition(".")[2]) == 6


@all_cases(
    ("shown", "expected"),
    [
        (formats.shortened("cmpl-0123456789abcdef"), "cmpl-…abcdef"),
        (formats.shortened("key_1"), "key_1"),
        (formats.duration(0), "0 ms"),
        (formats.duration(999.4), "999 ms"),
        (formats.duration(1_259), "1.25 s"),
        (formats.duration(59_999), "59.9 s"),
        (formats.duration(60_000), "1 min"),
        (formats.duration(3_599_999), "59 min 59 s"),
        (formats.duration((4 * 24 + 12) * 3_600_000 + 59_999), "4 d 12 h"),
        (formats.duration(24 * 3_600_000 + 3_599_000), "1 d"),
        (formats.size(1023), "1023 B"),
        (formats.size(2**28), "256 MiB"),
        (formats.size(2**30 - 1), "1024 MiB"),
        (formats.size(3 * 2**29), "1.5 GiB"),
        (formats.until(utc_now() - timedelta(days=1)), "now"),
        (formats.until(utc_now() + timedelta(hours=25, seconds=30)), "in 1 d 1 h"),
    ],
)
def test_values_are_short(shown: str, expected: str) -> None:
    assert shown == expected


def test_values_of_the_audit_log_are_words_and_units() -> None:
    values = {
        "limits": {"budget_micros": 12_500_000, "stored_bytes": 2**28, "tokens_per_day": None},
        "expires_at": "2027-01-06T12:33:35+01:00",
        "scopes": ["keys", "usage"],
        "is_shared": False,
        "weight": 0.5,
        "dialect": None,
    }
    assert formats.details(values) == (
        "budget: $12.50; stored bytes: 256 MiB; tokens per day: none; "
        "expires at: 2027-01-06 11:33:35 UTC; scopes: keys, usage; is shared: false; weight: 0.5"
    )


@pytest.mark.parametrize("exponent", range(19))
@all_cases("measure", [COST, TOKENS], ids=["cost", "tokens"])
def test_scales_step_by_1_2_2_and_a_half_or_5(measure: Measure, exponent: int) -> None:
    for first in (1, 3, 7):
        most = first * 10**exponent
        chart = stacked("", measure, ["2026-11-01", "2026-11-02"], [("a", [most, 0])])
        texts = [text for _, text in chart.lines]
        assert 2 <= len(texts) <= 6
        assert not any("e" in text for text in texts)
        # The largest letters, of a phone, are 14 pixels wide.
        assert 14 * max(map(len, texts)) <= chart.left <= chart.columns[0].x
        digits = texts[1].strip("$kMGTP").replace(".", "").strip("0")
        assert digits in ("1", "2", "25", "5")
        [part] = chart.columns[0].parts
        assert chart.lines[-1][0] <= part.y < chart.baseline
        assert not chart.columns[1].parts


def test_columns_stack_their_parts_and_name_them() -> None:
    series = [("m1", [3, 0]), ("m2", [1, 2])]
    chart = stacked("Tokens per hour", TOKENS, ["2026-11-01 07:00", "2026-11-01 08:00"], series)
    first, second = chart.columns
    low, high = first.parts
    assert round(low.y + low.height, 2) == chart.baseline
    assert round(high.y + high.height, 2) == low.y
    assert first.text == "2026-11-01 07:00: 4 tokens (m1 3 tokens, m2 1 tokens)"
    assert second.text == "2026-11-01 08:00: 2 tokens (m2 2 tokens)"
    assert [each[:3] for each in chart.legend] == [
        ("0", "m1", "3 tokens"),
        ("1", "m2", "3 tokens"),
    ]
    money = stacked("", COST, ["2026-11-01"], [("a", [1_234_567])])
    assert (money.total, money.shown_total) == ("$1.234567", "$1.23")
    rest = stacked("", TOKENS, ["2026-11-01"], [("others", [3])], [1])
    assert [each[:2] for each in rest.legend] == [("0", "others"), ("x", "others")]
    assert [text for _, text in chart.labels] == ["07:00", "08:00"]


def test_seconds_of_a_message_become_a_time() -> None:
    message = "<b> is reached. It resets in 86400.5 s."
    shown = formats.with_times(message, datetime(2026, 11, 1, tzinfo=UTC))
    assert shown.startswith("&lt;b&gt; is reached. It resets at <time ")
    assert "2026-11-02 00:00:00" in shown
