"""Reliability dashboard: failures, their effect on streams, and the infrastructure."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards.frame import dashboard, row
from ops.dashboards.panels import Query, graph
from ops.dashboards.promql import NAMESPACE, POOL, highest, quantile, rate, ratio, total


def build() -> Dashboard:
    """Return the dashboard."""
    return dashboard(
        "sluice-reliability",
        "Reliability",
        "Lost workers and resumed streams, Redis, the database, and availability of processes.",
        row(
            "Resumed streams",
            graph(
                "Lost attempts by reason",
                "cps",
                "Attempts that ended before their job did; another worker resumes the job.",
                Query(rate("sluice_gateway_resumed_jobs_total", NAMESPACE, "reason"), "{{reason}}"),
                Query(
                    rate("sluice_gateway_class_crossings_total", NAMESPACE),
                    "continued in another exactness class",
                ),
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
                "Responses taken over, messages fenced",
                "cps",
                "Responses that a gateway resumed after another gateway died, and messages of "
                "ended "
                "attempts, which gateways drop.",
                Query(
                    rate("sluice_gateway_answers_taken_over_total", NAMESPACE, "state"),
                    "taken over: {{state}}",
                ),
                Query(rate("sluice_gateway_fenced_messages_total", NAMESPACE), "fenced"),
            ),
        ),
        row(
            "Exactness",
            graph(
                "Engines that differ from their class",
                "short",
                "Workers whose canary found other results than those of their exactness class.",
                Query(total("sluice_worker_inexact", POOL, "pool"), "{{pool}}"),
                Query(f"count by (pool) (sluice_worker_inexact{{{POOL}}} == 0)", "{{pool}}: equal"),
                runbooks=["SluiceWorkerInexact"],
            ),
            graph(
                "Canaries by outcome",
                "cps",
                "Checks of idle engines. A job that arrives disturbs a check, which is repeated.",
                Query(rate("sluice_worker_canaries_total", POOL, "outcome"), "{{outcome}}"),
            ),
            graph(
                "Time of canaries",
                "percentunit",
                "Share of the time of engines.",
                Query(rate("sluice_worker_canary_seconds_total", POOL, "pool"), "{{pool}}"),
            ),
        ),
        row(
            "Processes",
            graph(
                "Responding processes",
                "short",
                "Targets that Prometheus can scrape, by job.",
                Query(
                    f'sum by (job) (up{{{NAMESPACE}, job=~"sluice-.+"}})',
                    "{{job}}",
                ),
                runbooks=["SluiceGatewayDown", "SluiceProcessDown"],
            ),
            graph(
                "Process starts in 15 minutes",
                "short",
                "Process starts by job; a deployment starts each process once.",
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
                "Processes by component and version; two versions during a rollout.",
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
                "Share of Redis's maximum memory.",
                Query(
                    ratio(
                        highest("sluice_redis_used_memory_bytes", NAMESPACE, "server"),
                        highest("sluice_redis_max_memory_bytes", NAMESPACE, "server"),
                    ),
                    "{{server}}",
                ),
                alert="SluiceRedisNearFull",
            ),
            graph(
                "Round trips by command, p99",
                "s",
                "Scripts by name. If all are slow, check the network and Redis; if one is, check "
                "that script.",
                Query(
                    quantile(0.99, "sluice_redis_command_duration_seconds", NAMESPACE, "command"),
                    "{{command}}",
                ),
            ),
            graph(
                "Failed commands",
                "percentunit",
                "Share of commands that failed.",
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
            "Redis, by server",
            graph(
                "Commands",
                "cps",
                "Commands of gateways and background jobs. The busiest server limits a cluster.",
                Query(
                    rate("sluice_redis_command_duration_seconds_count", NAMESPACE, "server"),
                    "{{server}}",
                ),
            ),
            graph(
                "Round trips, p99",
                "s",
                "99th percentile over all commands and scripts.",
                Query(
                    quantile(0.99, "sluice_redis_command_duration_seconds", NAMESPACE, "server"),
                    "{{server}}",
                ),
            ),
            graph(
                "Failed commands and redirections",
                "cps",
                "Commands that failed, and commands that were sent again because their slot moved.",
                Query(rate("sluice_redis_errors_total", NAMESPACE, "server"), "{{server}} failed"),
                Query(
                    rate("sluice_redis_redirections_total", NAMESPACE, "server", "kind"),
                    "{{server}} {{kind}}",
                ),
                alert="SluiceRedisErrors",
            ),
            graph(
                "Processes that cannot reach it",
                "short",
                "Gateways and background jobs to which the server does not respond.",
                Query(
                    f"count by (server) (sluice_redis_up{{{NAMESPACE}}})"
                    f" - sum by (server) (sluice_redis_up{{{NAMESPACE}}})",
                    "{{server}}",
                ),
                alert="SluiceRedisErrors",
            ),
        ),
        row(
            "Database",
            graph(
                "Statements",
                "cps",
                "Statements by operation.",
                Query(
                    rate("sluice_sql_statement_duration_seconds_count", NAMESPACE, "operation"),
                    "{{operation}}",
                ),
            ),
            graph(
                "Statements, p99",
                "s",
                "Statements by operation.",
                Query(
                    quantile(0.99, "sluice_sql_statement_duration_seconds", NAMESPACE, "operation"),
                    "{{operation}}",
                ),
            ),
            graph(
                "Failed statements",
                "percentunit",
                "Share of statements that failed.",
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
                "Time to certificate expiry",
                "s",
                "Remaining validity of the certificates of Redis and the database.",
                Query(
                    "min by (peer) "
                    f"(sluice_certificate_expiry_timestamp_seconds{{{NAMESPACE}}}) - time()",
                    "{{peer}}",
                ),
                alert="SluiceCertificateExpiry",
            ),
            graph(
                "Failed reply writes",
                "cps",
                "Replies that Redis did not accept; workers retry them.",
                Query(rate("sluice_worker_reply_write_failures_total", POOL, "pool"), "{{pool}}"),
                runbooks=["SluiceRedisErrors"],
            ),
            graph(
                "Engine restarts",
                "cps",
                "Restarts of engines that died or hung.",
                Query(rate("sluice_worker_engine_restarts_total", POOL, "pool"), "{{pool}}"),
                runbooks=["SluiceEngineCrashLoop"],
            ),
        ),
    )
