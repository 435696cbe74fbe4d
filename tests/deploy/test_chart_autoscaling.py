"""Settings of KEDA and the HorizontalPodAutoscaler, and their numbers in docs/capacity.md."""

import re
from pathlib import Path
from typing import Any

import yaml

from gateway.records.errors import ModelLoadingError, NoWorkerError
from tests.deploy.helm import CHART, case, named, of_kind, render
from tests.support.stack import REPOSITORY
from tests.telemetry.test_rules import needs_promtool, promtool

AUTOSCALING = CHART / "ci" / "autoscaling-values.yaml"
METRICS = (REPOSITORY / "docs" / "metrics.md").read_text()
MOST_SEQUENCES = 256
"""The chart's default of engine.maxSequences."""


def triggers(pool: str) -> dict[str, Any]:
    """Return the triggers of a pool by name."""
    scaled = named(case(AUTOSCALING), "ScaledObject", f"sluice-worker-{pool}")
    return {each["name"]: each for each in scaled["spec"]["triggers"]}


def test_demand_counts_waiting_and_running_jobs_of_the_model() -> None:
    jobs = triggers("chat")["jobs"]
    of_model = r'{namespace="inference",model=~"llama-3\\.1-8b"}'
    assert jobs["metadata"]["query"] == (
        f"(sum(max by (model) (sluice_queue_waiting_jobs{of_model} >= 0))"
        f" + sum(max by (model) (sluice_queue_leased_jobs{of_model} >= 0))) * 0.75"
    )
    assert jobs["metricType"] == "AverageValue"
    # Four fifths of the batch; a missing reply does not count as no demand.
    assert jobs["metadata"]["threshold"] == str(MOST_SEQUENCES * 4 // 5)
    assert jobs["metadata"]["ignoreNullValues"] == "false"
    assert triggers("chat-spot")["jobs"]["metadata"]["threshold"] == "100"


@needs_promtool
def test_demand_of_a_host_is_that_of_all_its_models(tmp_path: Path) -> None:
    def of(name: str, model: str, **values: int) -> list[dict[str, str]]:
        # The gateway `blind` cannot read Redis.
        return [
            {
                "series": f"{name}{{namespace='inference',model='{model}',pod='{pod}'}}",
                "values": f"{value} {value}",
            }
            for pod, value in {**values, "blind": "NaN"}.items()
        ]

    waiting, leased = "sluice_queue_waiting_jobs", "sluice_queue_leased_jobs"
    rare = 'a "rare" one (2.0)'
    series = [
        *of(waiting, "qwen3-8b", one=3, other=4),
        *of(waiting, rare, one=20, other=20),
        *of(waiting, "qwen3-8b-other", one=500),
        *of(leased, "qwen3-8b", one=100, other=100),
        *of(leased, rare, one=0, other=0),
        *of("sluice_queue_oldest_wait_seconds", "qwen3-8b", one=1),
        *of("sluice_queue_oldest_wait_seconds", rare, one=45),
        *of("sluice_queue_waiting_batch_jobs", rare, one=7),
    ]
    expected = {"jobs": 124, "oldest-wait": 45, "wake": 1}
    samples = [
        {
            "expr": triggers("shared")[name]["metadata"]["query"],
            "eval_time": "1m",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for name, value in expected.items()
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.dump({"tests": [{"input_series": series, "promql_expr_test": samples}]}))
    promtool("test", "rules", file)
    # Four fifths of the smaller batch.
    assert triggers("shared")["jobs"]["metadata"]["threshold"] == "40"


def test_oldest_wait_adds_workers_in_proportion() -> None:
    wait = triggers("chat")["oldest-wait"]
    assert wait["metricType"] == "Value"
    assert wait["metadata"]["threshold"] == "10"
    assert wait["metadata"]["query"].startswith("max(sluice_queue_oldest_wait_seconds{")


def test_only_a_pool_that_scales_to_zero_is_woken() -> None:
    assert triggers("chat").keys() == {"jobs", "oldest-wait"}
    assert triggers("shared").keys() == {"jobs", "oldest-wait", "wake"}
    # Its workers announce that requests may wait for them, and any waiting job starts one.
    for pool, scales_to_zero in (("chat", False), ("chat-spot", True), ("rare", True)):
        worker = named(case(AUTOSCALING), "Deployment", f"sluice-worker-{pool}")
        (container,) = worker["spec"]["template"]["spec"]["containers"]
        names = {each["name"]: each.get("value") for each in container["env"]}
        assert (names.get("SLUICE_SCALES_TO_ZERO") == "true") == scales_to_zero
        assert triggers(pool)["jobs"]["metadata"]["activationThreshold"] == "0"
    wake = triggers("chat-spot")["wake"]["metadata"]
    # Requests for other models do not wake it.
    refused = r'namespace="inference",model=~"llama-3\\.1-8b",reason=~"no_worker|model_loading"'
    assert f"increase(sluice_gateway_refused_requests_total{{{refused}}}[5m])" in wake["query"]
    batches = (
        r'max(sluice_queue_waiting_batch_jobs{namespace="inference",model=~"llama-3\\.1-8b"} >= 0)'
    )
    assert batches in wake["query"]
    assert wake["threshold"] == "1"
    assert wake["activationThreshold"] == "0"


def test_queries_have_the_labels_of_the_configured_prometheus() -> None:
    query = triggers("rare")["jobs"]["metadata"]["query"]
    matchers = 'kubernetes_namespace="inference",cluster="eu-1",model=~"a \\"rare\\" one"'
    assert query.startswith(f"sum(max by (model) (sluice_queue_waiting_jobs{{{matchers}}} >= 0))")
    assert triggers("rare")["jobs"]["authenticationRef"] == {"name": "prometheus"}


def test_every_metric_of_a_query_is_documented() -> None:
    for pool in ("chat", "chat-spot", "rare", "shared"):
        for trigger in triggers(pool).values():
            names = re.findall(r"\bsluice_\w+", trigger["metadata"]["query"])
            assert names
            assert [name for name in names if f"| `{name}` |" not in METRICS] == []
    (scaler,) = of_kind(case(AUTOSCALING), "HorizontalPodAutoscaler")
    by_requests = scaler["spec"]["metrics"][1]["pods"]["metric"]["name"]
    assert f"| `{by_requests}` |" in METRICS


def test_reason_that_wakes_is_an_error_code() -> None:
    wake = triggers("rare")["wake"]["metadata"]["query"]
    assert f'"{NoWorkerError.code}|{ModelLoadingError.code}"' in wake


def test_fallback_is_the_usual_number_of_workers() -> None:
    def fallback(pool: str) -> int:
        scaled = named(case(AUTOSCALING), "ScaledObject", f"sluice-worker-{pool}")
        return int(scaled["spec"]["fallback"]["replicas"])

    assert (fallback("chat"), fallback("chat-spot"), fallback("rare")) == (2, 0, 1)


def test_workers_are_removed_one_by_one_and_later_than_they_load() -> None:
    scaled = named(case(AUTOSCALING), "ScaledObject", "sluice-worker-chat")
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 600
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


def test_gateways_are_scaled_by_cpu() -> None:
    (scaler,) = of_kind(case(AUTOSCALING), "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "sluice-gateway"
    assert scaler["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"] == 60
    plain = render(AUTOSCALING, settings={"gateway.autoscaling.targetRequestsInProgress": "0"})
    (scaler,) = of_kind(plain, "HorizontalPodAutoscaler")
    assert len(scaler["spec"]["metrics"]) == 1


# --- docs/capacity.md --------------------------------------------------------------------------

CAPACITY = (REPOSITORY / "docs" / "capacity.md").read_text()
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table after a heading of the page, without its head."""
    section = CAPACITY.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def default(path: str) -> Any:
    """Return a value of the chart."""
    value = DEFAULTS
    for part in path.split("."):
        value = value[part]
    return value


def test_defaults_are_those_of_the_capacity_page() -> None:
    documented = {row[0].strip("`"): row[1] for row in rows("The chart's defaults")}
    assert len(documented) >= 15
    assert (
        documented.pop("worker.defaults.autoscaling.jobsPerReplica")
        == "four fifths of `maxSequences`"
    )
    assert default("worker.defaults.autoscaling.jobsPerReplica") is None
    assert {path: str(default(path)) for path in documented} == documented
