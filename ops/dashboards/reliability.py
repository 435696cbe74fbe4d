"""Reliability dashboard: failures, their effect on streams, and the infrastructure."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards.frame import dashboard, row
from ops.dashboards.panels import Query, graph
from ops.dashboards.promql import NAMESPACE, POOL, highest, quantile, rate, ratio


def build() -> Dashboard:
    """Return the dashboard."""
    return dashboard(
        "sluice-reliability",
        "Reliability",
        "Lost workers and resumed streams, Redis, the database, and which processes answer.",
        row(
            "Streams that went on",
            graph(
                "Lost attempts by reason",
                "cps",
                "Attempts of jobs that were over before the job was; another worker goes on.",
                Query(rate("sluice_gateway_resumed_jobs_total", NAMESPACE, "reason"), "{{reason}}"),
            ),
            graph(
                "Pauses of resumed jobs",
                "s",
                "From the last reply of a lost attempt to the next token of its job.",
                *(
                    Query(
                        quantile(share, "sluice_gateway_resumption_pause_seconds", NAMESPACE),
                        f"p{share * 100:g}",
                    )
                    for share in (0.5, 0.99)
                ),
            ),
            graph(
                "Answers taken over, messages fenced",
                "cps",
                "Answers that a gateway went on with after another died, and messages of attempts "
                "that were over: dropped, as they should be.",
                Query(
                    rate("sluice_gateway_answers_taken_over_total", NAMESPACE, "state"),
                    "taken over: {{state}}",
                ),
                Query(rate("sluice_gateway_fenced_messages_total", NAMESPACE), "fenced"),
            ),
        ),
        row(
            "Processes",
            graph(
                "Processes that answer",
                "short",
                "Targets that Prometheus reaches, by kind.",
                Query(
                    f'sum by (job) (up{{{NAMESPACE}, job=~"sluice-.+"}})',
                    "{{job}}",
                ),
                runbooks=["SluiceGatewayDown", "SluiceProcessDown"],
            ),
            graph(
                "Process starts in 15 minutes",
                "short",
                "By kind; deployments start each once.",
                Query(
                    "sum by (job) (changes(process_start_time_seconds"
                    f'{{{NAMESPACE}, job=~"sluice-.+"}}[15m]))',
                    "{{job}}",
                ),
                runbooks=["SluiceEngineCrashLoop"],
            ),
            graph(
                "Versions",
                "short",
                "Processes by kind and version: two versions while a rollout goes on.",
                Query(
                    f"count by (component, version) (sluice_build_info{{{NAMESPACE}}})",
                    "{{component}} {{version}}",
                ),
                is_stacked=True,
            ),
        ),
        row(
            "Redis",
            graph(
                "Memory",
                "percentunit",
                "Of what Redis may use.",
                Query(
                    ratio(
                        highest("sluice_redis_used_memory_bytes", NAMESPACE, "namespace"),
                        highest("sluice_redis_max_memory_bytes", NAMESPACE, "namespace"),
                    ),
                    "used",
                ),
                alert="SluiceRedisNearFull",
            ),
            graph(
                "Round trips by command, p99",
                "s",
                "Scripts by name. All of them slow: the network or Redis; one: that script.",
                Query(
                    quantile(0.99, "sluice_redis_command_duration_seconds", NAMESPACE, "command"),
                    "{{command}}",
                ),
            ),
            graph(
                "Failed commands",
                "percentunit",
                "Commands that failed, of all.",
                Query(
                    "("
                    + rate("sluice_redis_errors_total", NAMESPACE)
                    + " or vector(0)) / ("
                    + rate("sluice_redis_command_duration_seconds_count", NAMESPACE)
                    + " > 0)",
                    "failed",
                ),
                alert="SluiceRedisErrors",
            ),
        ),
        row(
            "Database",
            graph(
                "Statements",
                "cps",
                "By what they do.",
                Query(
                    rate("sluice_sql_statement_duration_seconds_count", NAMESPACE, "operation"),
                    "{{operation}}",
                ),
            ),
            graph(
                "Statements, p99",
                "s",
                "By what they do.",
                Query(
                    quantile(0.99, "sluice_sql_statement_duration_seconds", NAMESPACE, "operation"),
                    "{{operation}}",
                ),
            ),
            graph(
                "Failed statements",
                "percentunit",
                "Statements that failed, of all.",
                Query(
                    "("
                    + rate("sluice_sql_errors_total", NAMESPACE)
                    + " or vector(0)) / ("
                    + rate("sluice_sql_statement_duration_seconds_count", NAMESPACE)
                    + " > 0)",
                    "failed",
                ),
                alert="SluiceSqlErrors",
            ),
        ),
        row(
            "Certificates and replies",
            graph(
                "Until certificates end",
                "s",
                "How long the certificates that Redis and the database show are still good.",
                Query(
                    "min by (peer) "
                    f"(sluice_certificate_expiry_timestamp_seconds{{{NAMESPACE}}}) - time()",
                    "{{peer}}",
                ),
                alert="SluiceCertificateExpiry",
            ),
            graph(
                "Replies that Redis did not take",
                "cps",
                "Workers keep them and try again.",
                Query(rate("sluice_worker_reply_write_failures_total", POOL, "pool"), "{{pool}}"),
                runbooks=["SluiceRedisErrors"],
            ),
            graph(
                "Engine restarts",
                "cps",
                "Engines started in place of one that died or hung.",
                Query(rate("sluice_worker_engine_restarts_total", POOL, "pool"), "{{pool}}"),
                runbooks=["SluiceEngineCrashLoop"],
            ),
        ),
    )
