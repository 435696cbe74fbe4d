"""Overview dashboard: whether customers are served, with one row for each other dashboard."""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards.frame import dashboard, row
from ops.dashboards.limits import (
    AVAILABILITY,
    FIRST_TOKEN,
    INTER_TOKEN,
    PAGING_BURN_RATES,
    Limit,
    Objective,
)
from ops.dashboards.panels import Panel, Query, drill_down, graph, number
from ops.dashboards.promql import MODEL, NAMESPACE, POOL, highest, quantile, rate, ratio, total

GATEWAY: Final = drill_down("Gateway", "sluice-gateway")
QUEUE: Final = drill_down("Queue and fairness", "sluice-queue")
ENGINE: Final = drill_down("Workers and engines", "sluice-engine")
TENANTS: Final = drill_down("Tenants and money", "sluice-tenants")
RELIABILITY: Final = drill_down("Reliability", "sluice-reliability")


def build() -> Dashboard:
    """Return the dashboard."""
    return dashboard(
        "sluice-overview",
        "Overview",
        "Service level objectives, and links to the dashboards with details.",
        row(
            "Service level",
            _kept("Requests served", AVAILABILITY, NAMESPACE, "did not fail with a 5xx"),
            _kept("First tokens in time", FIRST_TOKEN, MODEL, "arrived within 2.5 s"),
            _kept("Tokens in time", INTER_TOKEN, MODEL, "took at most 0.1 s for a token"),
            number(
                "Error budget left",
                "percentunit",
                "Share of the failures that the availability objective still allows in 30 days.",
                Query(f"1 - {_worst(AVAILABILITY, '30d', NAMESPACE)} / {AVAILABILITY.budget}"),
                runbooks=[AVAILABILITY.alert],
                limit=Limit(0, is_minimum=True),
                decimals=1,
            ),
            number(
                "Firing alerts",
                "short",
                "Firing alerts of Sluice; each has a runbook.",
                Query(
                    f'count(ALERTS{{alertname=~"Sluice.+", alertstate="firing", {NAMESPACE}}})'
                    " or vector(0)"
                ),
                limit=Limit(1),
            ),
            number(
                "Requests in progress",
                "short",
                "Generation requests in progress in all gateways.",
                Query(total("sluice_gateway_requests_in_progress", NAMESPACE)),
                link=GATEWAY,
            ),
        ),
        row(
            "Objectives: errors as a multiple of the allowed rate",
            _burn("Availability", AVAILABILITY, NAMESPACE, "failed requests"),
            _burn("First token", FIRST_TOKEN, MODEL, "first tokens after more than 2.5 s"),
            _burn("Inter-token", INTER_TOKEN, MODEL, "replies of more than 0.1 s a token"),
        ),
        row(
            "Traffic",
            graph(
                "Requests by status",
                "reqps",
                "Generation requests by status. 499 means that the client disconnected.",
                Query(rate("sluice_gateway_requests_total", NAMESPACE, "status"), "{{status}}"),
                link=GATEWAY,
                is_stacked=True,
            ),
            graph(
                "Rejected by reason",
                "reqps",
                "Requests rejected before any work. Limits and budgets belong to the customer; "
                "overloaded, no_worker and store_unavailable are faults of this deployment.",
                Query(
                    rate("sluice_gateway_refused_requests_total", NAMESPACE, "reason"), "{{reason}}"
                ),
                link=GATEWAY,
                is_stacked=True,
            ),
            graph(
                "Tokens",
                "suffix: tok/s",
                "Prompt and completion tokens of requests, counted when they end.",
                Query(rate("sluice_gateway_prompt_tokens_total", MODEL), "prompt"),
                Query(rate("sluice_gateway_cached_tokens_total", MODEL), "of these cached"),
                Query(rate("sluice_gateway_completion_tokens_total", MODEL), "completion"),
                link=TENANTS,
            ),
        ),
        row(
            "Latency",
            _speed(
                "Time to first token",
                "sluice_gateway_time_to_first_token_seconds",
                "From the request's arrival to its first token, including queue and prompt.",
                FIRST_TOKEN.alert,
            ),
            _speed(
                "Inter-token latency",
                "sluice_gateway_inter_token_latency_seconds",
                "Time between two replies of a stream, for each token of the second.",
                INTER_TOKEN.alert,
            ),
            _speed(
                "Response duration",
                "sluice_gateway_request_duration_seconds",
                "From the request's arrival to the end of its response.",
            ),
        ),
        row(
            "Queue and engines",
            graph(
                "Oldest wait",
                "s",
                "Waiting time of the oldest job of each model.",
                Query(
                    f"namespace_model:sluice_queue_oldest_wait_seconds:max{{{MODEL}}}", "{{model}}"
                ),
                alert="SluiceQueueSlow",
                runbooks=["SluiceQueueStalled"],
                link=QUEUE,
            ),
            graph(
                "Ready workers",
                "short",
                "Workers of each model that claim jobs.",
                Query(f"namespace_model:sluice_queue_ready_workers:max{{{MODEL}}}", "{{model}}"),
                alert="SluiceNoReadyWorker",
                link=ENGINE,
            ),
            graph(
                "Engine utilization",
                "percentunit",
                "Running sequences as a share of the maximum of the pool's engines. At 100 %, "
                "requests wait in the queue.",
                Query(f"namespace_pool:sluice_worker_sequences:ratio{{{POOL}}}", "{{pool}}"),
                link=ENGINE,
            ),
        ),
        row(
            "Money and stores",
            graph(
                "Ledger lag",
                "s",
                "Age of the oldest usage record that is not in the ledger.",
                Query(highest("sluice_ledger_lag_seconds", NAMESPACE, "namespace"), "lag"),
                alert="SluiceLedgerLag",
                link=TENANTS,
            ),
            graph(
                "Redis memory",
                "percentunit",
                "Share of Redis's maximum memory. When it is full, every request is rejected.",
                Query(
                    ratio(
                        highest("sluice_redis_used_memory_bytes", NAMESPACE, "server"),
                        highest("sluice_redis_max_memory_bytes", NAMESPACE, "server"),
                    ),
                    "{{server}}",
                ),
                alert="SluiceRedisNearFull",
                link=RELIABILITY,
            ),
            graph(
                "Redis and database, p99",
                "s",
                "99th percentile of round trips to Redis and of database statements.",
                Query(quantile(0.99, "sluice_redis_command_duration_seconds", NAMESPACE), "Redis"),
                Query(
                    quantile(0.99, "sluice_sql_statement_duration_seconds", NAMESPACE), "database"
                ),
                link=RELIABILITY,
            ),
        ),
    )


def _worst(objective: Objective, window: str, where: str) -> str:
    return f"max({objective.bad}{window}{{{where}}})"


def _kept(title: str, objective: Objective, where: str, what: str) -> Panel:
    """Return a panel with the good share over the time range, of the worst model or namespace."""
    return number(
        title,
        "percentunit",
        f"Share that {what}, over the dashboard's time range; the objective is "
        f"{objective.target:.1%}.",
        Query(f"1 - max(avg_over_time({objective.bad}5m{{{where}}}[$__range]))"),
        runbooks=[objective.alert],
        limit=Limit(objective.target, is_minimum=True),
        decimals=2,
    )


def _burn(title: str, objective: Objective, where: str, what: str) -> Panel:
    """Return a panel with the burn rate; an alert pages above the limit."""
    return graph(
        f"{title}: burn rate",
        "suffix:x",
        f"{what.capitalize()}, as a multiple of the {objective.budget:.1%} that the objective "
        "allows. "
        f"The alert pages above {PAGING_BURN_RATES['6h']:g} for six hours or "
        f"{PAGING_BURN_RATES['1h']:g} for one.",
        *(
            Query(f"{_worst(objective, window, where)} / {objective.budget}", window)
            for window in PAGING_BURN_RATES
        ),
        runbooks=[objective.alert],
        limit=Limit(PAGING_BURN_RATES["1h"]),
    )


def _speed(title: str, histogram: str, description: str, alert: str | None = None) -> Panel:
    return graph(
        title,
        "s",
        f"{description} p50, p95 and p99; each dot is a request and links to its trace.",
        *(
            Query(
                quantile(share, histogram, MODEL), f"p{share * 100:g}", has_exemplars=share == 0.99
            )
            for share in (0.5, 0.95, 0.99)
        ),
        runbooks=[alert] if alert else [],
        link=GATEWAY,
    )
