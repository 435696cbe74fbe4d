"""Every metric of a gateway process."""

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter(
    "sluice_gateway_requests_total",
    "Generation requests answered, by endpoint, HTTP status and error code.",
    ["endpoint", "status", "code"],
)
REQUESTS_IN_PROGRESS = Gauge(
    "sluice_gateway_requests_in_progress", "Generation requests being served."
)
PROMPT_TOKENS = Counter(
    "sluice_gateway_prompt_tokens_total", "Prompt tokens of finished requests.", ["model"]
)
CACHED_TOKENS = Counter(
    "sluice_gateway_cached_tokens_total", "Prompt tokens found in the prefix cache.", ["model"]
)
COMPLETION_TOKENS = Counter(
    "sluice_gateway_completion_tokens_total", "Completion tokens of finished requests.", ["model"]
)
TIME_TO_FIRST_TOKEN = Histogram(
    "sluice_gateway_time_to_first_token_seconds",
    "From the request's arrival to the first reply of a worker.",
    ["model"],
    buckets=(
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1,
        2.5,
        5,
        7.5,
        10,
        20,
        40,
        80,
        160,
    ),
)
REQUEST_DURATION = Histogram(
    "sluice_gateway_request_duration_seconds",
    "From the request's arrival to the end of its answer.",
    ["model"],
    buckets=(
        0.01,
        0.05,
        0.1,
        0.3,
        0.5,
        0.8,
        1,
        1.5,
        2,
        2.5,
        5,
        10,
        15,
        20,
        30,
        60,
        120,
        240,
        480,
        960,
    ),
)
DISCONNECTS = Counter(
    "sluice_gateway_disconnects_total", "Requests whose client went away before the end."
)
SHED_JOBS = Counter(
    "sluice_gateway_shed_jobs_total",
    "Waiting jobs that gave their place in a full queue to a more urgent request of this gateway.",
    ["model"],
)
RESUMED_JOBS = Counter(
    "sluice_gateway_resumed_jobs_total",
    "Attempts of jobs that were over before the job was, by reason; the rest goes to another worker.",
    ["reason"],
)
RESUMPTION_PAUSE = Histogram(
    "sluice_gateway_resumption_pause_seconds",
    "From the last reply of an attempt that was lost to the next token of its job.",
    buckets=(0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30, 60, 120),
)
FENCED_MESSAGES = Counter(
    "sluice_gateway_fenced_messages_total",
    "Messages of attempts that were over already; none of them reaches a client.",
)
JOBS_IN_FLIGHT = Gauge(
    "sluice_gateway_jobs_in_flight", "Jobs enqueued by this gateway and not finished."
)
WAITING_JOBS = Gauge(
    "sluice_queue_waiting_jobs", "Jobs waiting in the queue of a model.", ["model"]
)
LEASED_JOBS = Gauge("sluice_queue_leased_jobs", "Jobs leased to workers.", ["model"])
READY_WORKERS = Gauge(
    "sluice_queue_ready_workers", "Workers that claim jobs of a model.", ["model"]
)
ANSWERS_TAKEN_OVER = Counter(
    "sluice_gateway_answers_taken_over_total",
    "Answers that this gateway went on with: running ones of a gateway that is gone, or left ones.",
    ["state"],
)
