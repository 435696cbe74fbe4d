"""The queries that come again and again.

`where` is a list of label matchers: NAMESPACE, MODEL, POOL, ENGINE or TENANT below, with others behind it.
Counters and histograms are read over `$__rate_interval`.
"""

from typing import Final

NAMESPACE: Final = 'namespace=~"$namespace"'
MODEL: Final = f'{NAMESPACE}, model=~"$model"'
"""What gateways tell by model."""
POOL: Final = f'{NAMESPACE}, pool=~"$pool"'
"""What workers tell: Prometheus gives their pool to everything that it reads from them."""
ENGINE: Final = f'{POOL}, model_name=~"$model"'
"""What vLLM tells."""
TENANT: Final = f'{NAMESPACE}, tenant=~"$tenant"'


def rate(counter: str, where: str, *by: str) -> str:
    """Return how much is counted in a second."""
    return f"{_sum(by)} (rate({counter}{{{where}}}[$__rate_interval]))"


def increase(counter: str, where: str, *by: str) -> str:
    """Return how much was counted in the dashboard's whole time."""
    return f"{_sum(by)} (increase({counter}{{{where}}}[$__range]))"


def quantile(share: float, histogram: str, where: str, *by: str) -> str:
    """Return what `share` of the observations of a histogram do not exceed."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', where, *by, 'le')})"


def mean(histogram: str, where: str, *by: str) -> str:
    """Return the mean of a histogram's observations."""
    return ratio(rate(f"{histogram}_sum", where, *by), rate(f"{histogram}_count", where, *by))


def total(gauge: str, where: str, *by: str) -> str:
    """Return the sum of what processes tell."""
    return f"{_sum(by)} ({gauge}{{{where}}})"


def highest(gauge: str, where: str, *by: str) -> str:
    """Return the largest of what processes tell: of things that they all see, the newest."""
    by_clause = f"max by ({', '.join(by)})" if by else "max"
    return f"{by_clause} ({gauge}{{{where}}})"


def ratio(part: str, whole: str) -> str:
    """Return `part` divided by `whole`, and nothing while the whole is nothing."""
    return f"{part} / ({whole} > 0)"


def _sum(by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)})" if by else "sum"
