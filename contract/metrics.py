"""What the metrics of all processes have in common."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Final

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Gauge,
    GCCollector,
    Metric,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

UNKNOWN: Final = float("nan")
"""Value of a gauge that cannot be told at the moment: it fires no alert and draws no line."""

_BUILD_INFO: Final = Gauge(
    "sluice_build_info",
    "1, with the version of Sluice and what part of it this process is.",
    ["version", "component"],
)


def begin_metrics(component: str) -> None:
    """Say which program this process is: `gateway`, `worker`, `jobs` or `beat`."""
    # When each series began doubles the number of lines, and nobody asks for it.
    disable_created_metrics()
    _BUILD_INFO.labels(version("sluice"), component).set(1)


def bare_registry() -> CollectorRegistry:
    """Return what every process tells, for one that imports metrics of another's but has nothing to say of them."""
    registry = CollectorRegistry()
    registry.register(_BUILD_INFO)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        _ = collector(registry=registry)
    return registry


def exposition(accept: str) -> tuple[bytes, str]:
    """Return all metrics of this process as a scraper accepts them, and the content type of that.

    OpenMetrics, which has exemplars, is given to those whose header `Accept` names it.
    """
    encode, content_type = choose_encoder(accept)
    return encode(REGISTRY), content_type


class LightHistogram(Collector):
    """A histogram with one label for what happens thousands of times a second, on one thread.

    prometheus-client's own takes a lock for each of two numbers and looks at one bucket after the other, which
    for what is observed with every token would cost a twentieth of all that a gateway does for it.
    """

    def __init__(
        self, name: str, documentation: str, *, label: str, buckets: Sequence[float]
    ) -> None:
        """`buckets` are the upper bounds, ascending, without infinity."""
        self._name = name
        self._documentation = documentation
        self._label = label
        self._bounds = tuple(buckets)
        self._children: dict[str, LightHistogramChild] = {}
        REGISTRY.register(self)

    def labels(self, value: str) -> "LightHistogramChild":
        """Return the series with a value of the label, the same one each time."""
        child = self._children.get(value)
        if child is None:
            child = self._children[value] = LightHistogramChild(self._bounds)
        return child

    @override
    def describe(self) -> Iterable[Metric]:
        """Return the histogram without values."""
        return [self._family()]

    @override
    def collect(self) -> Iterator[Metric]:
        """Return the histogram with the values of all series."""
        family = self._family()
        for value, child in list(self._children.items()):
            family.add_metric([value], child.buckets, child.sum)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=[self._label])


class LightHistogramChild:
    """One series."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.sum = 0.0
        """Of all observed values."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds as Prometheus writes them, and how many values are not above each."""
        names = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        return list(zip(names, accumulate(self._counts), strict=True))
