"""Metrics of a gateway process, without the metrics of Redis and the database."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, Literal, get_args

from prometheus_client import Counter, Gauge, Histogram

from common.metrics import LightCounter, LightCounterChild, LightHistogram

OTHER: Final = "other"
"""Label for values without their own: unknown routes and methods, and tenants that are not
listed."""
REASONS_OF_LIMITS: Final = (
    *("requests", "tokens", "audio_seconds", "concurrency", "budget_exceeded"),
    *("insufficient_credits", "insufficient_quota", "overloaded"),
)
"""Rejection codes that are exported from process start."""
REASONS_OF_MODELS: Final = ("no_worker", "model_loading")
"""Rejection codes that are exported for each model."""
LossReason = Literal[
    "lease_expired",
    "replies_lost",
    "adopted",
    "forgotten",
    "draining",
    "engine_died",
    "preempted",
    "adapter_failed",
    "prompt_lost",
]
"""Why an attempt of a job ended before the job did."""
_METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})

_HTTP_REQUESTS: Final = LightCounter(
    "sluice_gateway_http_requests_total",
    "Responses sent, for every route.",
    ["route", "method", "status"],
)
_HTTP_REQUEST_DURATION: Final = LightHistogram(
    "sluice_gateway_http_request_duration_seconds",
    "From the head of a request to the last byte of its response.",
    ["route", "method"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
REQUESTS: Final = LightCounter(
    "sluice_gateway_requests_total",
    "Responses to generation requests, by endpoint, HTTP status and error code.",
    ["endpoint", "status", "code"],
)
REQUESTS_IN_PROGRESS = Gauge(
    "sluice_gateway_requests_in_progress", "Generation requests in progress."
)
OBJECTS_DROPPED: Final = Counter(
    "sluice_gateway_objects_dropped_total",
    "Kept responses and entries of prompt logs that could not be written.",
    ["what"],
)
PROMPT_CACHE_BYTES: Final = Gauge(
    "sluice_gateway_prompt_cache_bytes", "Memory of token ids that later prompts can reuse."
)
BATCH_LINES_RUNNING: Final = Gauge(
    "sluice_gateway_batch_lines_running", "Lines of batches that this gateway runs."
)
BATCH_LINES: Final = Counter(
    "sluice_gateway_batch_lines_total",
    "Lines of batches whose results this gateway has stored; outcome is completed or failed.",
    ["outcome"],
)
for _outcome in ("completed", "failed"):
    BATCH_LINES.labels(_outcome)  # Exported even while it is 0.
ADMITTED_REQUESTS: Final = LightCounter(
    "sluice_gateway_admitted_requests_total",
    "Generation requests whose reservation was granted, by model and service tier.",
    ["model", "tier"],
)
ALIAS_REQUESTS: Final = LightCounter(
    "sluice_gateway_alias_requests_total",
    "Generation requests for an alias whose reservation was granted, by the model that runs them.",
    ["alias", "model"],
)
REFUSED_REQUESTS = Counter(
    "sluice_gateway_refused_requests_total",
    "Generation requests rejected before any work, by error code; model only if it has no worker.",
    ["reason", "model"],
)
_PROMPT_TOKENS = LightCounter(
    "sluice_gateway_prompt_tokens_total", "Prompt tokens of ended requests.", ["model"]
)
_CACHED_TOKENS = LightCounter(
    "sluice_gateway_cached_tokens_total", "Prompt tokens found in the prefix cache.", ["model"]
)
_COMPLETION_TOKENS = LightCounter(
    "sluice_gateway_completion_tokens_total", "Completion tokens of ended requests.", ["model"]
)
TENANT_REQUESTS = LightCounter(
    "sluice_gateway_tenant_requests_total",
    "Responses to generation requests, by tenant and HTTP status.",
    ["tenant", "status"],
)
_TENANT_TOKENS = LightCounter(
    "sluice_gateway_tenant_tokens_total",
    "Tokens of ended requests by tenant; kind is prompt, cached, completion or recomputed.",
    ["tenant", "kind"],
)
_TENANT_PREEMPTIONS = LightCounter(
    "sluice_gateway_tenant_preemptions_total",
    "How often sequences of ended requests left an engine to make room, by tenant.",
    ["tenant"],
)
_COSTS = LightCounter(
    "sluice_gateway_cost_micros_total",
    "Cost in micro-dollars of ended requests, by tenant and model.",
    ["tenant", "model"],
)
TIME_TO_FIRST_TOKEN = LightHistogram(
    "sluice_gateway_time_to_first_token_seconds",
    "From the arrival of a streamed request to its first token.",
    ["model"],
    buckets=(
        *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25),
        *(0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    ),
)
INTER_TOKEN_LATENCY = LightHistogram(
    "sluice_gateway_inter_token_latency_seconds",
    "Time between two replies of a choice with tokens, divided by the tokens of the second.",
    ["model"],
    buckets=(
        *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
        *(0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40),
    ),
)
REQUEST_DURATION: Final = LightHistogram(
    "sluice_gateway_request_duration_seconds",
    "From the arrival of a request to the end of its response.",
    ["model"],
    buckets=(
        *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5),
        *(5, 10, 15, 20, 30, 60, 120, 240, 480, 960),
    ),
)
DISCONNECTS = Counter(
    "sluice_gateway_disconnects_total", "Requests whose client disconnected before the end."
)
SHED_JOBS = Counter(
    "sluice_gateway_shed_jobs_total",
    "Waiting jobs shed from a full queue in favor of a more urgent request of this gateway.",
    ["model"],
)
RESUMED_JOBS = Counter(
    "sluice_gateway_resumed_jobs_total",
    "Attempts that ended before their job did, by reason; another worker resumes the job.",
    ["reason"],
)
CLASS_CROSSINGS = Counter(
    "sluice_gateway_class_crossings_total",
    "Resumptions on an engine of another exactness class than that of the last token.",
    ["model"],
)
PROMPT_CHUNKS = Counter(
    "sluice_gateway_prompt_chunks_total",
    "Parts of 16 KiB of long prompts that were kept or written in Redis before a job.",
    ["outcome"],
)
for _outcome in ("kept", "written"):
    PROMPT_CHUNKS.labels(_outcome)
GONE_WORKERS = Counter(
    "sluice_gateway_gone_workers_total",
    "Workers that this gateway found gone: killed, stopped, or cut off from Redis.",
)
RESUMPTION_PAUSE = Histogram(
    "sluice_gateway_resumption_pause_seconds",
    "From the last reply of a lost attempt to the next token of its job.",
    buckets=(0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60, 120),
)
FENCED_MESSAGES = Counter(
    "sluice_gateway_fenced_messages_total",
    "Messages from attempts that had already ended; they are dropped.",
)
LOOP_LAG = Histogram(
    "sluice_gateway_loop_lag_seconds",
    "Delay of the event loop, sampled about eight times a second.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
LOOP_HOLDS = Counter(
    "sluice_gateway_loop_holds_total",
    "Detected blocks of the event loop for more than 20 ms, by route.",
    ["route"],
)
BACKGROUND: Final = "background"
"""Route label for work that belongs to no request."""
# Export the metric at 0 before anything blocks the loop.
LOOP_HOLDS.labels(BACKGROUND)
REPLY_FRAMES = Counter(
    "sluice_gateway_reply_frames_total", "Reply frames read from workers, and from other gateways."
)
JOBS_IN_FLIGHT = Gauge(
    "sluice_gateway_jobs_in_flight", "Jobs enqueued by this gateway and not finished."
)
RESERVED_REQUESTS = Gauge(
    "sluice_gateway_reserved_requests", "Reservations that this gateway holds."
)
WAITING_JOBS = Gauge(
    "sluice_queue_waiting_jobs", "Jobs waiting in the queue of a model.", ["model"]
)
WAITING_BATCH_JOBS = Gauge(
    "sluice_queue_waiting_batch_jobs", "Batch jobs waiting in the queue of a model.", ["model"]
)
OLDEST_WAIT = Gauge(
    "sluice_queue_oldest_wait_seconds",
    "Wait of the oldest job in the queue of a model; 0 if none waits.",
    ["model"],
)
WAITING_TENANTS = Gauge(
    "sluice_queue_waiting_tenants",
    "Tenants with waiting jobs in the queue of a model.",
    ["model"],
)
LEASED_JOBS = Gauge("sluice_queue_leased_jobs", "Jobs leased to workers.", ["model"])
READY_WORKERS = Gauge(
    "sluice_queue_ready_workers", "Workers that claim jobs of a model.", ["model"]
)
OF_MODELS: Final = (
    WAITING_JOBS,
    WAITING_BATCH_JOBS,
    OLDEST_WAIT,
    WAITING_TENANTS,
    LEASED_JOBS,
    READY_WORKERS,
)
"""Gauges that have one series for each known model."""
RESPONSES_TAKEN_OVER = Counter(
    "sluice_gateway_answers_taken_over_total",
    "Responses that this gateway took over, by state.",
    ["state"],
)
IMAGE_FETCHES = Counter(
    "sluice_gateway_image_fetches_total",
    "Images given by URL; outcome is fetched, refused (before any request), failed or late.",
    ["outcome"],
)


# Export these at 0: Prometheus sees no increase when a series begins with its first event.
for _reason in REASONS_OF_LIMITS:
    REFUSED_REQUESTS.labels(_reason, "")
for _reason in get_args(LossReason):
    RESUMED_JOBS.labels(_reason)
for _outcome in ("fetched", "refused", "failed", "late"):
    IMAGE_FETCHES.labels(_outcome)


def model_known(name: str) -> None:
    """Export the model's counters while they are still 0."""
    CLASS_CROSSINGS.labels(name)
    for reason in REASONS_OF_MODELS:
        REFUSED_REQUESTS.labels(reason, name)


class TenantLabels:
    """The tenants that have their own label: a set that the operator limits."""

    def __init__(self) -> None:
        self._labelled: frozenset[str] = frozenset()

    def assign(self, tenant_ids: Iterable[str]) -> None:
        """Give only these tenants their own label."""
        self._labelled = frozenset(tenant_ids)

    def of(self, tenant_id: str) -> str:
        """Return the label of a tenant."""
        return tenant_id if tenant_id in self._labelled else OTHER


TENANTS: Final = TenantLabels()


def http_responded(route: str, method: str, status: int, *, seconds: float | None = None) -> None:
    """Count a response by route template; without `seconds` if its request was not parsed."""
    method = method if method in _METHODS else OTHER  # Clients can invent any number of methods.
    _HTTP_REQUESTS.labels(route, method, str(status)).inc()
    if seconds is not None:
        _HTTP_REQUEST_DURATION.labels(route, method).observe(seconds)


def route_label(scope: Mapping[str, Any]) -> str:
    """Return the path template of the route that matched a request."""
    route = scope.get("route")
    return OTHER if route is None else str(route.path)


def used(
    model: str, tenant_id: str, *, prompt: int, cached: int, completion: int, cost_micros: int
) -> None:
    """Count the tokens of a request that has ended, and its cost in micro-dollars."""
    tenant = TENANTS.of(tenant_id)
    _COSTS.labels(tenant, model).inc(cost_micros)
    counters = _token_counters(model, tenant)
    for (by_model, by_tenant), tokens in zip(counters, (prompt, cached, completion), strict=True):
        if tokens:
            by_model.inc(tokens)
            by_tenant.inc(tokens)


def preempted(tenant_id: str, preemptions: int, recomputed_tokens: int) -> None:
    """Count the preemptions of a request that has ended."""
    tenant = TENANTS.of(tenant_id)
    _TENANT_PREEMPTIONS.labels(tenant).inc(preemptions)
    _TENANT_TOKENS.labels(tenant, "recomputed").inc(recomputed_tokens)


# Cached for every request.


@cache
def _token_counters(model: str, tenant: str) -> list[tuple[LightCounterChild, LightCounterChild]]:
    """Return the counters by model and by tenant, for each kind of token."""
    return [
        (by_model.labels(model), _TENANT_TOKENS.labels(tenant, kind))
        for by_model, kind in (
            (_PROMPT_TOKENS, "prompt"),
            (_CACHED_TOKENS, "cached"),
            (_COMPLETION_TOKENS, "completion"),
        )
    ]
