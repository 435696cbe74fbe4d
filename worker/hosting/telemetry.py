"""The metrics of a worker host."""

from prometheus_client import Counter, Gauge, Histogram

SWAPS = Counter("sluice_host_swaps", "Swaps from another model to this one.", ["model"])
START_SECONDS = Histogram(
    "sluice_host_start_seconds",
    "Time from the decision to serve a model until its worker claims jobs, drain included. The "
    "worker was started (from disk) or woken (from sleep).",
    ["model", "source"],
    buckets=(1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600),
)
FAILURES = Counter(
    "sluice_host_worker_exits",
    "Workers that exited although the host did not stop them.",
    ["model"],
)
SERVED = Gauge("sluice_host_serves", "1 for the model whose worker runs or starts.", ["model"])


def serves(model: str | None) -> None:
    """Record the model whose worker runs; None if none runs."""
    SERVED.clear()
    if model is not None:
        SERVED.labels(model).set(1)
