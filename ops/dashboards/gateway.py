"""Gateway dashboard: responses, rejections and latency."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from ops.dashboards.frame import dashboard, row
from ops.dashboards.panels import Query, graph, heat
from ops.dashboards.promql import MODEL, NAMESPACE, quantile, rate, ratio, total

PROCESS = f'{NAMESPACE}, job="sluice-gateway"'


def build() -> Dashboard:
    """Return the dashboard."""
    return dashboard(
        "sluice-gateway",
        "Gateway",
        "Requests, rejections and latencies of gateways, and their processes.",
        row(
            "All routes: rate, errors, duration",
            graph(
                "Requests by route",
                "reqps",
                "Requests of every route, including management and health checks.",
                Query(rate("sluice_gateway_http_requests_total", NAMESPACE, "route"), "{{route}}"),
            ),
            graph(
                "Share of 5xx by route",
                "percentunit",
                "Share of responses with a status of 500 or more. A stream that fails after its "
                "first "
                "byte counts as a 200 here, and as failed below.",
                Query(
                    ratio(
                        "("
                        + rate(
                            "sluice_gateway_http_requests_total",
                            f'{NAMESPACE}, status=~"5.."',
                            "route",
                        )
                        + " or 0 * "
                        + rate("sluice_gateway_http_requests_total", NAMESPACE, "route")
                        + ")",
                        rate("sluice_gateway_http_requests_total", NAMESPACE, "route"),
                    ),
                    "{{route}}",
                ),
                runbooks=["SluiceAvailabilityBudgetBurn"],
            ),
            graph(
                "Duration by route, p99",
                "s",
                "From the head of a request to the last byte of its response.",
                Query(
                    quantile(
                        0.99, "sluice_gateway_http_request_duration_seconds", NAMESPACE, "route"
                    ),
                    "{{route}}",
                ),
            ),
        ),
        row(
            "Generation requests",
            graph(
                "By endpoint",
                "reqps",
                "Generation requests by endpoint, counted when they end.",
                Query(rate("sluice_gateway_requests_total", NAMESPACE, "endpoint"), "{{endpoint}}"),
                is_stacked=True,
            ),
            graph(
                "By status and error code",
                "reqps",
                "Result of each request, including errors within a stream; the codes are those of "
                "the API.",
                Query(
                    rate("sluice_gateway_requests_total", NAMESPACE, "status", "code"),
                    "{{status}} {{code}}",
                ),
                runbooks=["SluiceAvailabilityBudgetBurn"],
                is_stacked=True,
            ),
            graph(
                "In progress",
                "short",
                "Generation requests in progress and their jobs, by gateway.",
                Query(
                    total("sluice_gateway_requests_in_progress", NAMESPACE, "instance"),
                    "{{instance}} requests",
                ),
                Query(
                    total("sluice_gateway_jobs_in_flight", NAMESPACE, "instance"),
                    "{{instance}} jobs",
                ),
            ),
        ),
        row(
            "Admission",
            graph(
                "Admitted by tier",
                "reqps",
                "Requests whose reservation succeeded.",
                Query(rate("sluice_gateway_admitted_requests_total", MODEL, "tier"), "{{tier}}"),
                is_stacked=True,
            ),
            graph(
                "Rejected by reason",
                "reqps",
                "Requests rejected before any work, by error code.",
                Query(
                    rate("sluice_gateway_refused_requests_total", NAMESPACE, "reason"), "{{reason}}"
                ),
                is_stacked=True,
            ),
            graph(
                "Reservations held",
                "short",
                "Open reservations that each gateway renews.",
                Query(
                    total("sluice_gateway_reserved_requests", NAMESPACE, "instance"), "{{instance}}"
                ),
                runbooks=["SluiceReservationLeak"],
            ),
        ),
        row(
            "Aliases",
            graph(
                "Requests by alias",
                "reqps",
                "Admitted requests for aliases, by the model that runs them.",
                Query(
                    rate("sluice_gateway_alias_requests_total", MODEL, "alias", "model"),
                    "{{alias}} {{model}}",
                ),
                is_stacked=True,
            ),
            graph(
                "Share of each model in an alias",
                "percentunit",
                "Share of an alias's requests that a model runs. It differs from the weights if "
                "few callers send many requests, or if the fallback runs some.",
                Query(
                    rate("sluice_gateway_alias_requests_total", MODEL, "alias", "model")
                    + " / on (alias) group_left () ("
                    + rate("sluice_gateway_alias_requests_total", NAMESPACE, "alias")
                    + " > 0)",
                    "{{alias}} {{model}}",
                ),
            ),
        ),
        row(
            "Latency of generation",
            heat(
                "Time to first token",
                "s",
                "Distribution of the time to the first token.",
                Query(
                    rate("sluice_gateway_time_to_first_token_seconds_bucket", MODEL, "le"), "{{le}}"
                ),
            ),
            heat(
                "Inter-token latency",
                "s",
                "Distribution of the time of a reply for each of its tokens.",
                Query(
                    rate("sluice_gateway_inter_token_latency_seconds_bucket", MODEL, "le"), "{{le}}"
                ),
            ),
            graph(
                "Time to first token by model",
                "s",
                "95th percentile of the time to the first token.",
                Query(
                    quantile(0.95, "sluice_gateway_time_to_first_token_seconds", MODEL, "model"),
                    "{{model}}",
                    has_exemplars=True,
                ),
                runbooks=["SluiceFirstTokenBudgetBurn"],
            ),
        ),
        row(
            "Streams",
            graph(
                "Reply frames",
                "cps",
                "Frames that gateways read from workers; a frame carries all deltas of an engine "
                "step.",
                Query(
                    rate("sluice_gateway_reply_frames_total", NAMESPACE, "instance"), "{{instance}}"
                ),
            ),
            graph(
                "Client disconnects",
                "reqps",
                "Requests whose client disconnected before the end. Many at once suggest a proxy "
                "timeout.",
                Query(rate("sluice_gateway_disconnects_total", NAMESPACE), "left"),
            ),
            graph(
                "Images fetched by URL",
                "reqps",
                "Fetches of images, by result.",
                Query(
                    rate("sluice_gateway_image_fetches_total", NAMESPACE, "outcome"), "{{outcome}}"
                ),
            ),
        ),
        row(
            "Processes",
            graph(
                "Processor time",
                "percentunit",
                "Share of one core. Each process of a gateway uses at most one core; more load "
                "needs more gateways.",
                Query(rate("process_cpu_seconds_total", PROCESS, "instance"), "{{instance}}"),
            ),
            graph(
                "Event loop lag, p99",
                "s",
                "Delay of due callbacks in the event loop. While it is blocked, all streams of "
                "the gateway pause.",
                Query(
                    quantile(0.99, "sluice_gateway_loop_lag_seconds", NAMESPACE, "instance"),
                    "{{instance}}",
                ),
                alert="SluiceEventLoopHeld",
            ),
            graph(
                "Event loop blocked, by route",
                "cps",
                "Times that requests of a route blocked the event loop for more than 20 ms.",
                Query(rate("sluice_gateway_loop_holds_total", NAMESPACE, "route"), "{{route}}"),
                runbooks=["SluiceEventLoopHeld"],
            ),
            graph(
                "Memory",
                "bytes",
                "Resident memory of each gateway, and its token ids of prompts to reuse.",
                Query(total("process_resident_memory_bytes", PROCESS, "instance"), "{{instance}}"),
                Query(
                    total("sluice_gateway_prompt_cache_bytes", NAMESPACE, "instance"),
                    "{{instance}} prompts",
                ),
            ),
            graph(
                "Objects dropped",
                "cps",
                "Kept responses and entries of prompt logs that could not be written.",
                Query(rate("sluice_gateway_objects_dropped_total", NAMESPACE, "what"), "{{what}}"),
            ),
            graph(
                "Open files",
                "percentunit",
                "Share of the process's limit; each client connection is one open file.",
                Query(
                    ratio(
                        total("process_open_fds", PROCESS, "instance"),
                        total("process_max_fds", PROCESS, "instance"),
                    ),
                    "{{instance}}",
                ),
            ),
        ),
    )
