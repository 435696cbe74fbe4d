"""Queue dashboard: waiting jobs, wait times, and fair shares of tenants."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards.frame import dashboard, row
from ops.dashboards.panels import Query, graph, heat
from ops.dashboards.promql import MODEL, NAMESPACE, POOL, highest, quantile, rate, total

TOKENS = "sluice_gateway_tenant_tokens_total"
COMPLETIONS = f'{NAMESPACE}, kind="completion"'


def build() -> Dashboard:
    """Return the dashboard."""
    return dashboard(
        "sluice-queue",
        "Queue and fairness",
        "Jobs between gateways and workers, their waiting time, and shares of tenants.",
        row(
            "Waiting",
            graph(
                "Waiting jobs",
                "short",
                "Jobs of each model that no worker has claimed. Autoscaling of workers uses this "
                "value, without batch jobs.",
                Query(f"namespace_model:sluice_queue_waiting_jobs:max{{{MODEL}}}", "{{model}}"),
                Query(
                    f"max by (model) (sluice_queue_waiting_batch_jobs{{{MODEL}}})",
                    "{{model}} batch",
                ),
                runbooks=["SluiceQueueStalled"],
            ),
            graph(
                "Oldest wait",
                "s",
                "Waiting time of the oldest job. Autoscaling of workers uses this value as well.",
                Query(
                    f"namespace_model:sluice_queue_oldest_wait_seconds:max{{{MODEL}}}", "{{model}}"
                ),
                alert="SluiceQueueSlow",
                runbooks=["SluiceQueueStalled"],
            ),
            graph(
                "Waiting tenants",
                "short",
                "Tenants with waiting jobs. One tenant with a long queue is a burst; many tenants "
                "are load.",
                Query(f"namespace_model:sluice_queue_waiting_tenants:max{{{MODEL}}}", "{{model}}"),
            ),
        ),
        row(
            "Claiming",
            graph(
                "Wait before a claim",
                "s",
                "From the enqueueing of a job to its claim: the queue's part of the time to first "
                "token.",
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
                "Distribution of the wait before a claim.",
                Query(rate("sluice_worker_queue_wait_seconds_bucket", POOL, "le"), "{{le}}"),
            ),
            graph(
                "Claims",
                "cps",
                "Jobs that the workers of each pool claim.",
                Query(rate("sluice_worker_jobs_claimed_total", POOL, "pool"), "{{pool}}"),
            ),
        ),
        row(
            "Leases",
            graph(
                "Leased jobs",
                "short",
                "Jobs that workers have claimed and not finished.",
                Query(f"namespace_model:sluice_queue_leased_jobs:max{{{MODEL}}}", "{{model}}"),
            ),
            graph(
                "Ready workers",
                "short",
                "Workers of each model that claim jobs.",
                Query(f"namespace_model:sluice_queue_ready_workers:max{{{MODEL}}}", "{{model}}"),
                alert="SluiceNoReadyWorker",
            ),
            graph(
                "Lost attempts by reason",
                "cps",
                "Attempts that ended before their job did; another worker resumes the job.",
                Query(rate("sluice_gateway_resumed_jobs_total", NAMESPACE, "reason"), "{{reason}}"),
            ),
        ),
        row(
            "Fairness",
            graph(
                "Share of completion tokens",
                "percentunit",
                "Share of each tenant in all generated tokens. While several tenants have waiting "
                "jobs, "
                "shares follow their weights. SLUICE_METRICS_TENANTS lists the tenants with a "
                "series.",
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
                "A tier multiplies the tenant's weight: priority by 2, flex by 0.5.",
                Query(rate("sluice_gateway_admitted_requests_total", MODEL, "tier"), "{{tier}}"),
                is_stacked=True,
            ),
            graph(
                "Shed and rejected because the queue is full",
                "cps",
                "Waiting jobs that were shed for a more urgent request, and requests that were "
                "rejected.",
                Query(rate("sluice_gateway_shed_jobs_total", MODEL, "model"), "{{model}} shed"),
                Query(
                    rate(
                        "sluice_gateway_refused_requests_total",
                        f'{NAMESPACE}, reason="overloaded"',
                    ),
                    "rejected",
                ),
                runbooks=["SluiceQueueSlow"],
            ),
        ),
        row(
            "Batches",
            graph(
                "Batches by status",
                "short",
                "Batches that have not ended.",
                Query(highest("sluice_batches", NAMESPACE, "status"), "{{status}}"),
                is_stacked=True,
            ),
            graph(
                "Lines of batches",
                "short",
                "Lines of running batches: waiting, released to gateways, or done.",
                Query(highest("sluice_batch_lines", NAMESPACE, "state"), "{{state}}"),
                is_stacked=True,
            ),
            graph(
                "Lines that gateways run",
                "short",
                "Lines of batches that gateways run at the moment.",
                Query(total("sluice_gateway_batch_lines_running", NAMESPACE), "running"),
            ),
            graph(
                "Lines that end",
                "cps",
                "Lines whose results gateways have stored, by outcome.",
                Query(
                    rate("sluice_gateway_batch_lines_total", NAMESPACE, "outcome"), "{{outcome}}"
                ),
                runbooks=["SluiceBatchStarved"],
            ),
            graph(
                "Deadline slack",
                "s",
                "Least time between the projected end of a running batch and its deadline.",
                Query(
                    f"min by (namespace) (sluice_batch_deadline_slack_seconds{{{NAMESPACE}}})",
                    "slack",
                ),
                runbooks=["SluiceBatchLate"],
            ),
            graph(
                "Time without an ended line",
                "s",
                "Longest time for which no line of a running batch has ended.",
                Query(highest("sluice_batch_starved_seconds", NAMESPACE), "longest"),
                runbooks=["SluiceBatchStarved"],
            ),
        ),
    )
