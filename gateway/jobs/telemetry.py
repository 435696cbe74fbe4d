"""Metrics of `sluice jobs`, without the metrics of its stores."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

TASKS: Final = Counter(
    "sluice_jobs_tasks_total",
    "Celery tasks run; outcome is succeeded or failed.",
    ["task", "outcome"],
)
TASK_DURATION: Final = Histogram(
    "sluice_jobs_task_duration_seconds",
    "Duration of Celery tasks.",
    ["task"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600, 3000),
)
LAST_SUCCESS: Final = Gauge(
    "sluice_jobs_last_success_timestamp_seconds",
    "Unix time of the last success of each task in this process, in seconds.",
    ["task"],
)
WAITING_RUNS: Final = Gauge(
    "sluice_jobs_waiting_runs",
    "Runs of a track that wait in the broker for `sluice jobs`; reported by `sluice beat`.",
    ["track"],
)
LEDGER_LAG: Final = Gauge(
    "sluice_ledger_lag_seconds",
    "Age of the oldest usage record that is not in the ledger yet; 0 if there is none.",
)
PENDING_RECORDS: Final = Gauge(
    "sluice_ledger_pending_records", "Usage records that are not in the ledger yet."
)
OPEN_RESERVATIONS: Final = Gauge("sluice_quota_open_reservations", "Reservations in Redis.")
OVERDUE_RESERVATIONS: Final = Gauge(
    "sluice_quota_overdue_reservations",
    "Reservations whose lease expired at least a minute ago and that the sweep has not ended.",
)
SWEPT_RESERVATIONS: Final = Counter(
    "sluice_quota_swept_reservations_total", "Abandoned reservations that the sweep has ended."
)
LOST_MICROS: Final = Counter(
    "sluice_ledger_lost_micros_total",
    "Cost in micro-dollars of tokens that requests of dead gateways used and that nobody pays for.",
)
BATCHES: Final = Gauge("sluice_batches", "Batches that have not ended, by status.", ["status"])
BATCH_LINES: Final = Gauge(
    "sluice_batch_lines",
    "Lines of running batches; state is waiting, running (released to gateways) or done.",
    ["state"],
)
BATCH_SLACK: Final = Gauge(
    "sluice_batch_deadline_slack_seconds",
    "Least time between the projected end of a running batch and its deadline; negative if it will "
    "be late. Infinite while no line of a running batch has ended.",
)
BATCH_STARVED: Final = Gauge(
    "sluice_batch_starved_seconds",
    "Longest time for which no line of a running batch has ended; 0 without running batches.",
)
EXPIRING_KEYS: Final = Gauge(
    "sluice_keys_expiring", "Valid API keys that expire within 1d or 7d.", ["within"]
)
EXPORTED: Final = Counter(
    "sluice_export_events_total",
    "Events of an export by sink; outcome is delivered, rejected (put aside) or failed (an attempt "
    "that is repeated).",
    ["sink", "outcome"],
)
EXPORT_LAG_ROWS: Final = Gauge(
    "sluice_export_lag_rows", "Ledger rows that are not exported to a sink yet.", ["sink"]
)
EXPORT_LAG: Final = Gauge(
    "sluice_export_lag_seconds",
    "Time since the end of the oldest request that is not exported to a sink; 0 if there is none.",
    ["sink"],
)
EXPORT_BATCHES: Final = Gauge(
    "sluice_export_batches",
    "Batches of an export by sink; state is pending, held, rejected or uncertain.",
    ["sink", "state"],
)
EXPORT_HELD: Final = Gauge(
    "sluice_export_held_micros",
    "Micro-dollars of tenants without a customer in the billing system of a sink.",
    ["sink"],
)
