"""Metrics helpers that all processes share."""

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
from typing_extensions import override

UNKNOWN: Final = float("nan")
"""Value of a gauge whose value is unknown: it fires no alert and draws no line."""

_BUILD_INFO: Final = Gauge(
    "sluice_build_info",
    "Always 1; the labels hold the version of Sluice and the component of this process.",
    ["version", "component"],
)


def begin_metrics(component: str) -> None:
    """Set up metrics and name the component: `gateway`, `worker`, `jobs` or `beat`."""
    # `_created` series would double the number of lines, and nothing uses them.
    disable_created_metrics()  # type: ignore[no-untyped-call] # prometheus-client's own
    _BUILD_INFO.labels(version("sluice"), component).set(1)


def bare_registry() -> CollectorRegistry:
    """Return a registry with only the metrics that every process has.

    For a process that imports the metrics of another component but never sets them.
    """
    registry = CollectorRegistry()
    registry.register(_BUILD_INFO)
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        _ = collector(registry=registry)
    return registry


def exposition(source: Collector, accept: str) -> tuple[bytes, str]:
    """Return the metrics of a source in a format the scraper accepts, and its content type.

    OpenMetrics, which supports exemplars, is used if the header `Accept` names it.
    """
    encode, content_type = choose_encoder(accept)
    return encode(source), content_type


class LightHistogram(Collector):
    """A histogram with one label for events that are recorded thousands of times per second.

    Threads may record events at once: CPython does not switch threads within an update.

    The histogram of prometheus-client takes two locks per observation and searches its buckets
    linearly. For one observation per token, this would be a twentieth of the gateway's work per
    token.
    """

    def __init__(
        self, name: str, documentation: str, *, label: str, buckets: Sequence[float]
    ) -> None:
        """Register the histogram. `buckets` are its upper bounds, ascending, without infinity."""
        self._name = name
        self._documentation = documentation
        self._label = label
        self._bounds = tuple(buckets)
        self._children: dict[str, LightHistogramChild] = {}
        REGISTRY.register(self)

    def labels(self, value: str) -> "LightHistogramChild":
        """Return the series for a value of the label; the same object on each call."""
        child = self._children.get(value)
        if child is None:
            child = self._children[value] = LightHistogramChild(self._bounds)
        return child

    def describe(self) -> Iterable[Metric]:
        """Return the histogram without values, for the registry's check for duplicate names."""
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
    """One series of a `LightHistogram`."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.sum = 0.0
        """Sum of all observed values."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Record a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Each upper bound in Prometheus notation, with the number of values at or below it."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))
