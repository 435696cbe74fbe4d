"""Tenant dashboard: usage by tenant, and whether usage reaches the ledger."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards.frame import Variable, dashboard, row
from ops.dashboards.limits import Limit
from ops.dashboards.panels import Query, graph, number
from ops.dashboards.promql import (
    MICROS,
    MODEL,
    NAMESPACE,
    TENANT,
    highest,
    increase,
    rate,
    ratio,
)

TENANTS = Variable(
    "tenant",
    "Tenant",
    f"label_values(sluice_gateway_tenant_requests_total{{{NAMESPACE}}}, tenant)",
)


COSTS = "sluice_gateway_cost_micros_total"
SOLD = f'{TENANT}, model=~"$model"'


def build() -> Dashboard:
    """Return the dashboard."""
    return dashboard(
        "sluice-tenants",
        "Tenants and money",
        "Usage by tenant, reservations, and usage records on their way to the ledger. "
        "SLUICE_METRICS_TENANTS lists the tenants with a series. Base invoices on the ledger "
        "(`sluice usage show`), not on these metrics.",
        row(
            "Tenants",
            graph(
                "Requests by tenant",
                "reqps",
                "Generation requests, counted when they end.",
                Query(rate("sluice_gateway_tenant_requests_total", TENANT, "tenant"), "{{tenant}}"),
                is_stacked=True,
            ),
            graph(
                "Failed requests by tenant",
                "percentunit",
                "Share of the tenant's responses with a status of 400 or more.",
                Query(
                    "("
                    + rate(
                        "sluice_gateway_tenant_requests_total",
                        f'{TENANT}, status=~"[45].."',
                        "tenant",
                    )
                    + " or 0 * "
                    + rate("sluice_gateway_tenant_requests_total", TENANT, "tenant")
                    + ") / ("
                    + rate("sluice_gateway_tenant_requests_total", TENANT, "tenant")
                    + " > 0)",
                    "{{tenant}}",
                ),
            ),
            graph(
                "Completion tokens by tenant",
                "suffix: tok/s",
                "Completion tokens, including those that best_of discards.",
                Query(
                    rate(
                        "sluice_gateway_tenant_tokens_total",
                        f'{TENANT}, kind="completion"',
                        "tenant",
                    ),
                    "{{tenant}}",
                ),
                is_stacked=True,
            ),
        ),
        row(
            "Tokens",
            graph(
                "Tokens by kind",
                "suffix: tok/s",
                "Tokens of the selected tenants; prompt tokens include cached tokens.",
                Query(rate("sluice_gateway_tenant_tokens_total", TENANT, "kind"), "{{kind}}"),
            ),
            graph(
                "Cached share of prompts",
                "percentunit",
                "Share of prompt tokens found in the prefix cache, which cost less.",
                Query(
                    ratio(
                        rate("sluice_gateway_cached_tokens_total", MODEL, "model"),
                        rate("sluice_gateway_prompt_tokens_total", MODEL, "model"),
                    ),
                    "{{model}}",
                ),
            ),
            graph(
                "Rejected by limits and money",
                "reqps",
                "Requests rejected because of limits, budgets or credits, by error code.",
                Query(
                    rate(
                        "sluice_gateway_refused_requests_total",
                        f"{NAMESPACE}, "
                        'reason=~"requests|tokens|audio_seconds|concurrency|budget_exceeded|'
                        'insufficient_credits|insufficient_quota"',
                        "reason",
                    ),
                    "{{reason}}",
                ),
                is_stacked=True,
            ),
        ),
        row(
            "Money",
            graph(
                "Revenue by tenant",
                "suffix: $/h",
                "Cost of ended requests, in dollars an hour at the current rate.",
                Query(_an_hour(rate(COSTS, SOLD, "tenant")), "{{tenant}}"),
                is_stacked=True,
            ),
            graph(
                "Revenue by model",
                "suffix: $/h",
                "Cost of ended requests, in dollars an hour at the current rate. Models without a "
                "price have no line.",
                Query(_an_hour(rate(COSTS, SOLD, "model")), "{{model}}"),
                is_stacked=True,
            ),
            graph(
                "Revenue for a million tokens",
                "currencyUSD",
                "Cost of ended requests, divided by their prompt and completion tokens: the price "
                "after discounts for cached tokens, tiers and batches.",
                Query(
                    ratio(
                        rate(COSTS, MODEL, "model"),
                        f"({rate('sluice_gateway_prompt_tokens_total', MODEL, 'model')}"
                        f" + {rate('sluice_gateway_completion_tokens_total', MODEL, 'model')})",
                    ),
                    "{{model}}",
                ),
            ),
        ),
        row(
            "Totals of the time range",
            number(
                "Revenue",
                "currencyUSD",
                "Cost of the ended requests of the selected tenants and models.",
                Query(f"{increase(COSTS, SOLD)} / {MICROS}"),
                decimals=2,
            ),
            number(
                "Not paid",
                "currencyUSD",
                "Cost of tokens that requests of dead gateways used and that nobody pays for.",
                Query(f"{increase('sluice_ledger_lost_micros_total', NAMESPACE)} / {MICROS}"),
                decimals=2,
            ),
            number(
                "Requests",
                "short",
                "Generation requests of the selected tenants.",
                Query(increase("sluice_gateway_tenant_requests_total", TENANT)),
                decimals=0,
            ),
            number(
                "Prompt tokens",
                "short",
                "Prompt tokens of the selected tenants, including cached tokens.",
                Query(increase("sluice_gateway_tenant_tokens_total", f'{TENANT}, kind="prompt"')),
                decimals=0,
            ),
            number(
                "Completion tokens",
                "short",
                "Completion tokens of the selected tenants.",
                Query(
                    increase("sluice_gateway_tenant_tokens_total", f'{TENANT}, kind="completion"')
                ),
                decimals=0,
            ),
            number(
                "Keys that expire today",
                "short",
                "Valid API keys that expire within a day.",
                Query(highest("sluice_keys_expiring", f'{NAMESPACE}, within="1d"')),
                runbooks=["SluiceKeyExpiry"],
                limit=Limit(1),
            ),
            number(
                "Keys that expire this week",
                "short",
                "Valid API keys that expire within seven days.",
                Query(highest("sluice_keys_expiring", f'{NAMESPACE}, within="7d"')),
            ),
            number(
                "Overdue reservations",
                "short",
                "Reservations that no gateway renews and the sweep has not ended.",
                Query(highest("sluice_quota_overdue_reservations", NAMESPACE)),
                runbooks=["SluiceReservationLeak"],
                limit=Limit(1),
            ),
        ),
        row(
            "Ledger",
            graph(
                "Ledger lag",
                "s",
                "Age of the oldest usage record that is not in the ledger.",
                Query(highest("sluice_ledger_lag_seconds", NAMESPACE, "namespace"), "lag"),
                alert="SluiceLedgerLag",
            ),
            graph(
                "Pending records",
                "short",
                "Usage records in Redis that are not in the ledger yet.",
                Query(highest("sluice_ledger_pending_records", NAMESPACE, "namespace"), "records"),
                runbooks=["SluiceLedgerLag"],
            ),
            graph(
                "Waiting runs",
                "short",
                "Runs of background jobs that are scheduled and that no process has taken.",
                Query(highest("sluice_jobs_waiting_runs", NAMESPACE, "track"), "{{track}}"),
                alert="SluiceJobsStalled",
            ),
            graph(
                "Open reservations",
                "short",
                "Reservations in Redis, and those that no gateway renews.",
                Query(highest("sluice_quota_open_reservations", NAMESPACE), "open"),
                Query(highest("sluice_quota_overdue_reservations", NAMESPACE), "overdue"),
                runbooks=["SluiceReservationLeak"],
            ),
        ),
        row(
            "Export to billing systems",
            graph(
                "Export lag",
                "s",
                "Time since the end of the oldest request that a sink lacks. Sinks of the kind "
                "stripe get sums once in each window, an hour by default.",
                Query(highest("sluice_export_lag_seconds", NAMESPACE, "sink"), "{{sink}}"),
                alert="SluiceExportStalled",
            ),
            graph(
                "Exported events",
                "cps",
                "Events by outcome; failed attempts are repeated.",
                Query(
                    rate("sluice_export_events_total", NAMESPACE, "sink", "outcome"),
                    "{{sink}} {{outcome}}",
                ),
                runbooks=["SluiceExportStalled"],
            ),
            graph(
                "Rows that wait for the export",
                "short",
                "Rows of the ledger that a sink lacks.",
                Query(highest("sluice_export_lag_rows", NAMESPACE, "sink"), "{{sink}}"),
            ),
            graph(
                "Batches of exports",
                "short",
                "Batches that sinks have not confirmed. Held ones wait for a customer in Stripe.",
                Query(
                    highest("sluice_export_batches", NAMESPACE, "sink", "state"),
                    "{{sink}} {{state}}",
                ),
                runbooks=["SluiceExportRejected"],
            ),
            number(
                "Held for lack of a customer",
                "short",
                "Micro-dollars of tenants without a customer in Stripe.",
                Query(highest("sluice_export_held_micros", NAMESPACE)),
            ),
        ),
        row(
            "Background jobs",
            graph(
                "Runs by outcome",
                "cps",
                "Runs of background jobs.",
                Query(
                    rate("sluice_jobs_tasks_total", NAMESPACE, "task", "outcome"),
                    "{{task}} {{outcome}}",
                ),
                runbooks=["SluiceJobsFailing"],
            ),
            graph(
                "Since the last success",
                "s",
                "Jobs run at least once a minute, except reconcile and encrypt (hourly) and "
                "prepare_partitions (every six hours).",
                Query(
                    "time() - "
                    + highest("sluice_jobs_last_success_timestamp_seconds", NAMESPACE, "task"),
                    "{{task}}",
                ),
                alert="SluiceJobsNotRunning",
                runbooks=["SluiceReconciliationOverdue"],
            ),
            graph(
                "Abandoned reservations swept",
                "cps",
                "Reservations of dead gateways that the sweep settled as lost, and the cost in "
                "micro-dollars of their tokens that nobody pays for.",
                Query(rate("sluice_quota_swept_reservations_total", NAMESPACE), "swept"),
                Query(rate("sluice_ledger_lost_micros_total", NAMESPACE), "lost micro-dollars"),
            ),
        ),
    )


def _an_hour(micros_a_second: str) -> str:
    """Return dollars an hour."""
    return f"{micros_a_second} * 3600 / {MICROS}"
