"""The metrics of the worker process."""

import time

from prometheus_client import Counter, Enum, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from contract.messages import WorkerState
from worker.engine.base import EngineStep

JOBS_CLAIMED = Counter("sluice_worker_jobs_claimed", "Jobs leased from the queue.")
JOBS_ENDED = Counter("sluice_worker_jobs_ended", "Jobs that left the worker.", ["outcome"])
JOBS_RUNNING = Gauge("sluice_worker_jobs_running", "Jobs that run in the worker.")
QUEUE_WAIT = Histogram(
    "sluice_worker_queue_wait_seconds",
    "Time from the last enqueueing of a job to its claim.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)
SEQUENCES_RUNNING = Gauge(
    "sluice_worker_sequences_running", "Sequences the engine samples in each step."
)
SEQUENCES_WAITING = Gauge(
    "sluice_worker_sequences_waiting", "Sequences that wait inside the engine."
)
MAX_SEQUENCES = Gauge(
    "sluice_worker_max_sequences", "Sequences the engine may run at once; 0 while there is none."
)
KV_CACHE_USAGE = Gauge(
    "sluice_worker_kv_cache_usage_ratio", "Fraction of the KV cache in use, 0 to 1."
)
PROMPT_TOKENS = Counter(
    "sluice_worker_prompt_tokens", "Prompt tokens that the engine has processed."
)
COMPLETION_TOKENS = Counter("sluice_worker_completion_tokens", "Tokens sampled by the engine.")
ENGINE_STEPS = Counter("sluice_worker_engine_steps", "Engine steps that produced tokens.")
PREEMPTIONS = Counter(
    "sluice_worker_preemptions", "Sequences that the engine preempted for lack of memory."
)
BATCH_JOBS_RUNNING = Gauge("sluice_worker_batch_jobs_running", "Batch jobs that run in the worker.")
PREEMPTED_SEQUENCES = Counter(
    "sluice_worker_preempted_sequences",
    "Sequences that left the engine: of batch jobs, of a tenant that used most, or beyond a share.",
    ["source"],
)
PREEMPTED_TOKENS = Counter(
    "sluice_worker_preempted_tokens",
    "Completion tokens of these sequences, which are processed again when they resume.",
    ["source"],
)
for _source in ("batch", "tenant", "share"):
    PREEMPTED_SEQUENCES.labels(_source)
    PREEMPTED_TOKENS.labels(_source)
PARKED_SEQUENCES = Gauge(
    "sluice_worker_parked_sequences",
    "Sequences of running jobs that wait in the worker for room in the engine.",
)
SEAT_WAIT = Histogram(
    "sluice_worker_seat_wait_seconds",
    "Time for which a sequence of a running job waited in the worker for room in the engine.",
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
PASSED_JOBS = Counter(
    "sluice_worker_affinity_passed_jobs",
    "Jobs that a later one of their tenant was preferred to, because this worker had cached more "
    "of its prompt.",
)
KEPT_JOBS = Counter(
    "sluice_worker_affinity_kept_jobs",
    "Jobs that this worker left for a worker that had cached more of their prompts, or had served "
    "their sessions.",
)
AFFINITY_WAIT = Counter(
    "sluice_worker_affinity_wait_seconds",
    "Time that claimed jobs waited after they were first passed over, or left for another worker, "
    "at most SLUICE_AFFINITY_SECONDS each.",
)
HELD_DIGESTS = Gauge(
    "sluice_worker_held_digests",
    "Prefixes in this worker's cache, and other things, that claims compare with jobs.",
)
PROMPT_CHUNKS = Counter(
    "sluice_worker_prompt_chunks",
    "Parts of 16 KiB of long prompts: held (in the worker's memory), read (from Redis) or lost.",
    ["outcome"],
)
for _outcome in ("held", "read", "lost"):
    PROMPT_CHUNKS.labels(_outcome)
ADAPTERS_LOADED = Gauge(
    "sluice_worker_adapters_loaded", "LoRA adapters that the engine has loaded."
)
_ADAPTER_LOADS = Counter(
    "sluice_worker_adapter_loads",
    "Loads of LoRA adapters: loaded, unavailable (no files), rejected or failed.",
    ["outcome"],
)
for _outcome in ("loaded", "unavailable", "rejected", "failed"):
    _ADAPTER_LOADS.labels(_outcome)
_ADAPTER_LOAD_SECONDS = Histogram(
    "sluice_worker_adapter_load_seconds",
    "Time to download, verify and load a LoRA adapter.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
ADAPTER_EVICTIONS = Counter(
    "sluice_worker_adapter_evictions", "LoRA adapters unloaded to make room for others."
)
INEXACT = Gauge(
    "sluice_worker_inexact",
    "1 while the engine does not return the results of its exactness class, as its canary found.",
)
_CANARIES = Counter(
    "sluice_worker_canaries",
    "Checks of the engine's results: exact, mismatch, disturbed (by a job) or failed.",
    ["outcome"],
)
for _outcome in ("exact", "mismatch", "disturbed", "failed"):
    _CANARIES.labels(_outcome)
_CANARY_SECONDS = Counter("sluice_worker_canary_seconds", "Time of these checks.")
JOB_SECONDS = Histogram(
    "sluice_worker_job_seconds",
    "Time from claim to the end of a job.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
FRAMES_WRITTEN = Counter("sluice_worker_frames_written", "Reply frames written to gateways.")
REPLY_WRITE_FAILURES = Counter(
    "sluice_worker_reply_write_failures", "Failed writes of reply frames to Redis."
)
HEARTBEAT_GAP = Histogram(
    "sluice_worker_heartbeat_gap_seconds",
    "Time between two heartbeats of the worker.",
    buckets=(0.275, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 1, 1.5, 2, 3, 5, 10),
)
READY = Gauge("sluice_worker_ready", "1 while the worker claims jobs.")
STATE = Enum("sluice_worker_state", "State of the worker.", states=[*WorkerState])
ENGINE_RESTARTS = Counter("sluice_worker_engine_restarts", "Restarts of engines that died or hung.")
_NEXT_START = Gauge(
    "sluice_worker_engine_start_pause_seconds",
    "Time until the next restart of a dead engine; 0 if none is scheduled.",
)


def next_start_at(at: float) -> None:
    """Set the time of the next engine start, in seconds of `time.monotonic`."""
    _NEXT_START.set_function(lambda: max(at - time.monotonic(), 0.0))


def begin_again() -> None:
    """Set all metrics to their first values.

    Workers of a host have one port, one after the other. If the counters of an earlier one came
    back, their increases would count again.
    """
    for metric in (each for each in globals().values() if isinstance(each, MetricWrapperBase)):
        for each in (metric, *getattr(metric, "_metrics", {}).values()):
            if each._is_observable():  # noqa: SLF001 - prometheus-client resets only counters
                each._metric_init()  # noqa: SLF001 - as above


def canary(outcome: str, seconds: float) -> None:
    """Count a check of the engine's results."""
    _CANARIES.labels(outcome).inc()
    _CANARY_SECONDS.inc(seconds)


def adapter_load(outcome: str, seconds: float) -> None:
    """Count a load of an adapter."""
    _ADAPTER_LOADS.labels(outcome).inc()
    _ADAPTER_LOAD_SECONDS.observe(seconds)


def note_step(step: EngineStep) -> None:
    """Count one engine step."""
    ENGINE_STEPS.inc()
    COMPLETION_TOKENS.inc(sum([len(output.token_ids) for output in step.outputs]))
    if step.preemptions:
        PREEMPTIONS.inc(step.preemptions)
    if step.stats is not None:
        SEQUENCES_RUNNING.set(step.stats.running)
        SEQUENCES_WAITING.set(step.stats.waiting)
        KV_CACHE_USAGE.set(step.stats.kv_usage)
