"""Metrics helpers that all processes share."""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from itertools import accumulate
from typing import Final, Generic, TypeVar

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
from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from common import clock

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
    disable_created_metrics()
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


C = TypeVar("C")


class _LightMetric(Collector, Generic[C]):
    """A metric for events that are recorded many times per second.

    Threads may record events at once: CPython does not switch threads within an update. The metrics
    of prometheus-client take locks and check each call.
    """

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self.label_names = tuple(labels)
        self._name = name
        self._documentation = documentation
        self._children: dict[tuple[str, ...], C] = {}
        self.labels: Callable[..., C] = cache(self._add)
        """Returns the series for the values of the labels; the same object on each call."""
        REGISTRY.register(self)

    def describe(self) -> Iterable[Metric]:
        """Return the metric without values, for the registry's check for duplicate names."""
        return [self._family({})]

    @override
    def collect(self) -> Iterator[Metric]:
        yield self._family(self._children.copy())

    def _add(self, *values: str) -> C:
        child = self._children[values] = self._child()
        return child

    @abstractmethod
    def _child(self) -> C: ...

    @abstractmethod
    def _family(self, children: Mapping[tuple[str, ...], C]) -> Metric: ...


class LightCounter(_LightMetric["LightCounterChild"]):
    """A counter with labels."""

    @override
    def _child(self) -> "LightCounterChild":
        return LightCounterChild()

    @override
    def _family(self, children: Mapping[tuple[str, ...], "LightCounterChild"]) -> Metric:
        family = CounterMetricFamily(self._name, self._documentation, labels=self.label_names)
        for values, child in children.items():
            family.add_metric(values, child.value)
        return family


class LightCounterChild:
    """One series of a `LightCounter`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, number: int = 1) -> None:
        """Count events."""
        self.value += number


class LightHistogram(_LightMetric["LightHistogramChild"]):
    """A histogram with labels.

    The histogram of prometheus-client takes two locks per observation and searches its buckets
    linearly. For one observation per token, this would be a twentieth of the gateway's work per
    token.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], *, buckets: Sequence[float]
    ) -> None:
        """Register the histogram. `buckets` are its upper bounds, ascending, without infinity."""
        self._bounds = tuple(buckets)
        super().__init__(name, documentation, labels)

    @override
    def _child(self) -> "LightHistogramChild":
        return LightHistogramChild(self._bounds)

    @override
    def _family(self, children: Mapping[tuple[str, ...], "LightHistogramChild"]) -> Metric:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self.label_names)
        for values, child in children.items():
            family.add_metric(values, child.buckets, child.sum)
        return family


class LightHistogramChild:
    """One series of a `LightHistogram`."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.sum = 0.0
        """Sum of all observed values."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)

    def observe(self, value: float, exemplar: dict[str, str] | None = None) -> None:
        """Record a value, with the ids of its trace if there is one."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self.sum += value
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(exemplar, value, clock.now_ms() / 1000)

    @property
    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Each upper bound in Prometheus notation, the number of values up to it, and an exemplar.

        The exemplar is the last one of the values above the previous bound, if there is one.
        """
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = zip(names, accumulate(self._counts), self._exemplars, strict=True)
        return [
            (name, number) if exemplar is None else (name, number, exemplar)
            for name, number, exemplar in buckets
        ]
