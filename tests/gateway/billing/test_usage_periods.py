"""The sources of a report: every moment once, and sums only where they are current."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.usage.periods import (
    DAY,
    HOUR,
    MAX_SPANS,
    Bucket,
    Sources,
    Span,
    bucket_span,
    choose_sources,
)
from gateway.records.times import day_of, hour_of, next_month
from tests.support.cases import all_cases

START = datetime(2026, 2, 27, tzinfo=UTC)
moments = st.integers(0, 6 * 24 * 60).map(lambda minutes: START + timedelta(minutes=minutes))
hours = st.integers(0, 6 * 24).map(lambda number: START + number * HOUR)


@given(st.tuples(moments, moments), st.sets(hours, max_size=40), st.booleans())
def test_every_moment_is_covered_once_and_dirty_hours_from_the_ledger(
    ends: tuple[datetime, datetime], dirty: set[datetime], by_hour: bool
) -> None:
    whole = Span(min(ends), max(ends))
    sources = choose_sources(whole, dirty, by_hour=by_hour)
    spans = sorted((*sources.days, *sources.hours, *sources.rows))
    assert all(span.start < span.end for span in spans)
    edges = [whole.start, *(edge for span in spans for edge in (span.start, span.end)), whole.end]
    assert edges[::2] == edges[1::2]
    for span in sources.days:
        assert (span.start, span.end) == (day_of(span.start), day_of(span.end))
    for span in (*sources.days, *sources.hours):
        assert (span.start, span.end) == (hour_of(span.start), hour_of(span.end))
        assert not any(span.start <= hour < span.end for hour in dirty)
    assert not (by_hour and sources.days)


def test_whole_clean_days_come_only_from_daily_sums() -> None:
    whole = Span(START, START + 3 * DAY)
    assert choose_sources(whole, [], by_hour=False) == Sources((whole,), (), ())
    assert choose_sources(whole, [], by_hour=True) == Sources((), (whole,), ())


def test_only_the_dirty_hour_comes_from_the_ledger() -> None:
    whole = Span(START, START + 3 * DAY)
    dirty = START + DAY + 5 * HOUR
    assert choose_sources(whole, [dirty], by_hour=False) == Sources(
        (Span(START, START + DAY), Span(START + 2 * DAY, START + 3 * DAY)),
        (Span(START + DAY, dirty), Span(dirty + HOUR, START + 2 * DAY)),
        (Span(dirty, dirty + HOUR),),
    )


def test_parts_of_hours_come_from_the_ledger() -> None:
    minute = timedelta(minutes=1)
    whole = Span(START + 30 * minute, START + 2 * HOUR + minute)
    assert choose_sources(whole, [], by_hour=False) == Sources(
        (),
        (Span(START + HOUR, START + 2 * HOUR),),
        (Span(whole.start, START + HOUR), Span(START + 2 * HOUR, whole.end)),
    )
    within = Span(START + minute, START + 2 * minute)
    assert choose_sources(within, [], by_hour=False) == Sources((), (), (within,))


def test_very_many_gaps_are_read_together() -> None:
    whole = Span(START, START + 300 * DAY)
    dirty = [START + DAY + 2 * number * HOUR for number in range(3000)]
    sources = choose_sources(whole, dirty, by_hour=False)
    assert sources.rows == (Span(dirty[0], dirty[-1] + HOUR),)
    assert sources.hours == (Span(START, dirty[0]), Span(dirty[-1] + HOUR, whole.end))
    assert len(sources.hours) + len(sources.rows) <= MAX_SPANS


@all_cases(
    ("bucket", "label", "start", "end"),
    [
        (Bucket.HOUR, "2026-02-28T23", "2026-02-28T23:00", "2026-03-01T00:00"),
        (Bucket.DAY, "2026-02-28", "2026-02-28T00:00", "2026-03-01T00:00"),
        (Bucket.MONTH, "2026-02", "2026-02-01T00:00", "2026-03-01T00:00"),
        (Bucket.MONTH, "2026-12", "2026-12-01T00:00", "2027-01-01T00:00"),
        (Bucket.TOTAL, "", "2026-01-31T12:00", "2027-02-01T00:00"),
        (Bucket.MONTH, "2026-01", "2026-01-31T12:00", "2026-02-01T00:00"),
    ],
)
def test_buckets_follow_the_calendar_within_the_report(
    bucket: Bucket, label: str, start: str, end: str
) -> None:
    whole = Span(datetime(2026, 1, 31, 12, tzinfo=UTC), datetime(2027, 2, 1, tzinfo=UTC))
    expected = [datetime.fromisoformat(text).replace(tzinfo=UTC) for text in (start, end)]
    assert bucket_span(bucket, label, whole) == Span(*expected)


def test_months_are_contiguous() -> None:
    month = datetime(2027, 12, 1, tzinfo=UTC)
    for number in range(1, 30):
        month = next_month(month)
        assert (month.year - 2028) * 12 + month.month == number
        assert month.day == 1
