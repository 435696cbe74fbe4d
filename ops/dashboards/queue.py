"""Queue dashboard: waiting jobs, wait times, and fair shares of tenants."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards.frame import dashboard, row
from ops.dashboards.panels import Query, graph, heat
from ops.dashboards.promql import MODEL, NAMESPACE, POOL, quantile, rate

TOKENS = "sluice_gateway_tenant_tokens_total"
COMPLETIONS = f'{NAMESPACE}, kind="completion"'


def build() -> Dashboard:
    """Return the dashboard."""
    return dashboard(
        "sluice-queue",
        "Queue and fairness",
        "Jobs between gateways and workers: how many wait, for how long, and whose.",
        row(
            "Waiting",
            graph(
                "Waiting jobs",
                "short",
                "Jobs of each model that no worker has claimed. Workers are scaled by this.",
                Query(f"namespace_model:sluice_queue_waiting_jobs:max{{{MODEL}}}", "{{model}}"),
                runbooks=["SluiceQueueStalled"],
            ),
            graph(
                "Oldest wait",
                "s",
                "How long the oldest of them has waited. Workers are scaled by this, too.",
                Query(
                    f"namespace_model:sluice_queue_oldest_wait_seconds:max{{{MODEL}}}", "{{model}}"
                ),
                alert="SluiceQueueSlow",
                runbooks=["SluiceQueueStalled"],
            ),
            graph(
                "Waiting tenants",
                "short",
                "Tenants that have jobs waiting. One with a long queue is a burst, many are load.",
                Query(f"namespace_model:sluice_queue_waiting_tenants:max{{{MODEL}}}", "{{model}}"),
            ),
        ),
        row(
            "Claiming",
            graph(
                "Wait before a claim",
                "s",
                "From a job's enqueueing to its claim: the queue's part of the time to first token.",
                *(
                    Query(
                        quantile(share, "sluice_worker_queue_wait_seconds", POOL),
                        f"p{share * 100:g}",
                        has_exemplars=share == 0.99,
                    )
                    for share in (0.5, 0.95, 0.99)
                ),
            ),
            heat(
                "Waits before claims",
                "s",
                "How many jobs waited how long.",
                Query(rate("sluice_worker_queue_wait_seconds_bucket", POOL, "le"), "{{le}}"),
            ),
            graph(
                "Claims",
                "cps",
                "Jobs that the workers of each pool take from the queue.",
                Query(rate("sluice_worker_jobs_claimed_total", POOL, "pool"), "{{pool}}"),
            ),
        ),
        row(
            "Leases",
            graph(
                "Leased jobs",
                "short",
                "Jobs that workers hold.",
                Query(f"namespace_model:sluice_queue_leased_jobs:max{{{MODEL}}}", "{{model}}"),
            ),
            graph(
                "Ready workers",
                "short",
                "Workers that claim jobs of each model.",
                Query(f"namespace_model:sluice_queue_ready_workers:max{{{MODEL}}}", "{{model}}"),
                alert="SluiceNoReadyWorker",
            ),
            graph(
                "Jobs that lost their worker",
                "cps",
                "Attempts that were over before their job was, by reason; another worker goes on.",
                Query(rate("sluice_gateway_resumed_jobs_total", NAMESPACE, "reason"), "{{reason}}"),
            ),
        ),
        row(
            "Fairness",
            graph(
                "Share of completion tokens",
                "percentunit",
                "What each tenant gets of all that is generated. While several have work waiting, "
                "shares follow their weights; SLUICE_METRICS_TENANTS says who is shown by name.",
                Query(
                    f"{rate(TOKENS, COMPLETIONS, 'tenant')}"
                    f" / on () group_left () ({rate(TOKENS, COMPLETIONS)} > 0)",
                    "{{tenant}}",
                ),
                is_stacked=True,
            ),
            graph(
                "Admitted by tier",
                "reqps",
                "A tier multiplies its tenant's weight: priority by 2, flex by 0.5.",
                Query(rate("sluice_gateway_admitted_requests_total", MODEL, "tier"), "{{tier}}"),
                is_stacked=True,
            ),
            graph(
                "Shed and refused for lack of room",
                "cps",
                "Waiting jobs that gave their place to a more urgent request, and requests that a "
                "full queue refused.",
                Query(rate("sluice_gateway_shed_jobs_total", MODEL, "model"), "{{model}} shed"),
                Query(
                    rate(
                        "sluice_gateway_refused_requests_total",
                        f'{NAMESPACE}, reason="overloaded"',
                    ),
                    "refused",
                ),
                runbooks=["SluiceQueueSlow"],
            ),
        ),
    )
