"""Builders for common PromQL queries.

`where` is a list of label matchers: NAMESPACE, MODEL, POOL, ENGINE or TENANT below, followed by
others. Counters and histograms use `$__rate_interval`.
"""

from typing import Final

NAMESPACE: Final = 'namespace=~"$namespace"'
MODEL: Final = f'{NAMESPACE}, model=~"$model"'
"""Gateway metrics with a model label."""
POOL: Final = f'{NAMESPACE}, pool=~"$pool"'
"""Worker metrics; Prometheus adds the pool label to everything that it scrapes from workers."""
ENGINE: Final = f'{POOL}, model_name=~"$model"'
"""vLLM metrics."""
MICROS: Final = 1_000_000
"""Micro-dollars of a dollar."""
TENANT: Final = f'{NAMESPACE}, tenant=~"$tenant"'


def rate(counter: str, where: str, *by: str) -> str:
    """Return the rate of a counter per second."""
    return f"{_sum(by)} (rate({counter}{{{where}}}[$__rate_interval]))"


def increase(counter: str, where: str, *by: str) -> str:
    """Return the increase of a counter over the dashboard's whole time range."""
    return f"{_sum(by)} (increase({counter}{{{where}}}[$__range]))"


def quantile(share: float, histogram: str, where: str, *by: str) -> str:
    """Return the quantile `share` of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', where, *by, 'le')})"


def mean(histogram: str, where: str, *by: str) -> str:
    """Return the mean of a histogram's observations."""
    return ratio(rate(f"{histogram}_sum", where, *by), rate(f"{histogram}_count", where, *by))


def total(gauge: str, where: str, *by: str) -> str:
    """Return the sum of a gauge over all processes."""
    return f"{_sum(by)} ({gauge}{{{where}}})"


def highest(gauge: str, where: str, *by: str) -> str:
    """Return the maximum of a gauge over all processes; the newest, for values that all see."""
    by_clause = f"max by ({', '.join(by)})" if by else "max"
    return f"{by_clause} ({gauge}{{{where}}})"


def ratio(part: str, whole: str) -> str:
    """Return `part` divided by `whole`, and no value while `whole` is zero."""
    return f"{part} / ({whole} > 0)"


def _sum(by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)})" if by else "sum"
