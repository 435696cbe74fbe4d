"""Values, their schema, their documentation, and the settings of the processes agree."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from pydantic_settings import BaseSettings

import gateway.platform.settings
import worker.settings
from common.redis_url import cluster_address
from scripts import chart
from tests.deploy.helm import CASES, CHART, case, environment, named, pods, render
from tests.support.stack import CHECKPOINT, REPOSITORY
from worker.hosting.settings import HostSettings, read_models

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

TELEMETRY = {
    "SLUICE_LOG_FORMAT",
    "SLUICE_METRICS_HOST",
    "SLUICE_METRICS_PORT",
    "SLUICE_METRICS_TENANTS",
    "SLUICE_TRACES",
    "SLUICE_TRACE_CONTENT",
}
"""Settings of docs/metrics.md and of tracing, of which a worker lacks some."""
OTHER_PROGRAMS = {
    "REDIS_PASSWORD",  # Part of SLUICE_REDIS_URL.
    "POSTGRES_PASSWORD",  # Part of SLUICE_DATABASE_URL.
    "HOME",
    "USER",
    "HF_HOME",
    "HF_TOKEN",
    "VLLM_CACHE_ROOT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",  # OpenTelemetry's SDK reads these directly.
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "AWS_ENDPOINT_URL",  # The client of S3 reads these directly.
    "AWS_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "NCCL_DEBUG",  # extraEnv of ci/scheduling-values.yaml.
    "TZ",
}
PROCESSES = {"gateway", "worker", "host", "jobs", "beat", "migration"}

MADE_BY_OTHER_VALUES = {
    "gateway": {
        "audit_key",
        "audit_sink",
        "celery_broker_url",
        "cache_salt_secret",
        "encryption_keys",
        "export_sinks",
        "export_tokens",
        "database_url",
        "drain_delay",
        "drain_timeout",
        "file_store",
        "prompt_log_store",
        "host",
        "console_key_login",
        "jwt_algorithms",
        "jwt_audience",
        "jwt_issuer",
        "jwt_jwks_file",
        "jwt_jwks_url",
        "jwt_leeway",
        "jwt_operator_claim",
        "jwt_operator_reader_value",
        "jwt_operator_value",
        "jwt_role_claim",
        "jwt_secret",
        "mail_from",
        "smtp_url",
        "jwt_tenant_claim",
        "oidc_client_id",
        "oidc_client_secret",
        "oidc_email_tenants",
        "oidc_issuer",
        "oidc_operator_claim",
        "oidc_operator_reader_values",
        "oidc_operator_values",
        "oidc_role_claim",
        "oidc_roles",
        "oidc_scopes",
        "log_format",
        "metrics_host",
        "metrics_port",
        "metrics_tenants",
        "operator_host",
        "operator_port",
        "port",
        "processes",
        "redis_url",
        "trace_content",
        "traces",
    },
    "worker": {
        "chat_template",
        "context_window",
        "cpu_kv_cache_gib",
        "dialect",
        "drain_seconds",
        "enforce_eager",
        "ends_with_input",  # Its host sets it.
        "engine",
        "engine_arguments",
        "file_store",
        "health_host",
        "health_port",
        "lease_seconds",
        "scales_to_zero",
        "start_units",
        "log_format",
        "may_sleep",  # Its host sets it.
        "max_sequences",
        "model_aliases",
        "model_name",
        "model_path",
        "reasoning_parser",
        "runner",
        "redis_url",
        "tool_parser",
        "traces",
        "worker_id",  # Each process generates its own.
    },
    "host": {"health_host", "health_port", "log_format", "models", "redis_url"},
}


def settings_of(component: str) -> type[BaseSettings]:
    """Return the settings class of a component."""
    if component == "host":
        return HostSettings
    if component == "worker":
        return worker.settings.WorkerSettings
    return gateway.platform.settings.Settings


def process_of(container: Mapping[str, Any], component: str) -> str:
    """Return the kind of a container's process: that of a worker's pod may be a host."""
    return "host" if container.get("args") == ["host"] else component


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.name)
def test_every_environment_variable_is_a_setting_that_is_accepted(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = case(file)
    for pod in pods(manifests):
        for container in pod.containers:
            if (process := process_of(container, pod.component)) not in PROCESSES:
                continue
            known = settings_of(process)
            prefix = known.model_config["env_prefix"]
            names = {f"{prefix}{name.upper()}" for name in known.model_fields}
            if process == "host":  # Its workers inherit the environment.
                names |= {f"SLUICE_{name.upper()}" for name in settings_of("worker").model_fields}
            variables = environment(container, manifests)
            unknown = variables.keys() - names - TELEMETRY - OTHER_PROGRAMS
            assert unknown == set(), pod.owner
            with monkeypatch.context() as patch:
                for name, value in on_this_machine(variables, tmp_path).items():
                    patch.setenv(name, value)
                read = known()
                if process == "host":
                    config = named(manifests, "ConfigMap", pod.owner.removeprefix("Deployment "))
                    assert_models_are_accepted(config["data"], tmp_path)
            for name in known.model_fields:
                is_given = f"{prefix}{name.upper()}" in variables
                assert not is_given or name in read.model_fields_set, name


def assert_models_are_accepted(files: Mapping[str, str], folder: Path) -> None:
    """Check a host's models, with the tiny model and the folder of these files."""
    for name, content in files.items():
        (folder / name).write_text(content.replace("/etc/sluice/model", str(folder)))
    models = json.loads((folder / "models.json").read_text())
    names = [each["model_name"] for each in models]
    for each in models:
        if each["model_path"].startswith("/") or "adapter_slots" in each:
            each["model_path"] = str(CHECKPOINT)
    (folder / "models.json").write_text(json.dumps(models))
    assert [*read_models(folder / "models.json")] == names


def on_this_machine(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables with the tiny model, and files for settings that read one."""
    found = {name: value for name, value in variables.items() if name.startswith("SLUICE_")}
    if found.get("SLUICE_MODEL_PATH", "").startswith("/"):
        found["SLUICE_MODEL_PATH"] = str(CHECKPOINT)
    if "SLUICE_CHAT_TEMPLATE" in found:
        template = folder / "chat_template.jinja"
        template.write_text("{{ messages }}")
        found["SLUICE_CHAT_TEMPLATE"] = str(template)
    return found


def test_numbers_lists_and_booleans_are_parsed_by_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifests = case(CHART / "ci" / "config-values.yaml")
    for pod in pods(manifests):
        if pod.component == "gateway":
            variables = environment(pod.containers[0], manifests)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    read = gateway.platform.settings.Settings()
    assert read.max_waiting_jobs == 1_000_000
    assert read.queue_timeout.total_seconds() == 60.5
    assert read.answer_retention.total_seconds() == 0
    assert read.webhook_allow_private is True
    assert [str(network) for network in read.trusted_proxies] == ["10.0.0.0/8", "fd00::/8"]
    assert len(read.image_url_hosts) == 2
    assert read.cors_origins == ("https://app.example.com", "http://localhost:3000")


def test_every_setting_can_be_set() -> None:
    config = CHART / "ci" / "config-values.yaml"
    given = yaml.safe_load(config.read_text())
    keys = {
        "gateway": SCHEMA["definitions"]["settings"]["properties"],
        "worker": SCHEMA["definitions"]["workerSettings"]["properties"],
        "host": SCHEMA["definitions"]["poolHost"]["properties"]["config"]["properties"],
    }
    pools = yaml.safe_load((CHART / "ci" / "gpu-pools-values.yaml").read_text())["worker"]["pools"]
    (host,) = [pool["host"] for pool in pools if "host" in pool]
    used = {
        "gateway": given["config"],
        "worker": given["worker"]["pools"][0]["config"],
        "host": host["config"],
    }
    for component, others in MADE_BY_OTHER_VALUES.items():
        fields = settings_of(component).model_fields.keys()
        by_config = {camel(name) for name in fields - others}
        assert keys[component].keys() == by_config
        assert used[component].keys() == by_config


def camel(name: str) -> str:
    """Return the camel-case name of a setting."""
    first, *others = name.split("_")
    return first + "".join(part.title() for part in others)


def test_split_and_arguments_of_the_engine() -> None:
    manifests = case(CHART / "ci" / "gpu-pools-values.yaml")
    found = {}
    for pod in pods(manifests):
        if pod.component == "worker":
            text = environment(pod.containers[0], manifests).get("SLUICE_ENGINE_ARGUMENTS", "{}")
            found[pod.labels["sluice.io/pool"]] = json.loads(text)
    shared = named(manifests, "ConfigMap", "sluice-worker-shared")["data"]["models.json"]
    found["shared"] = [each["engine_arguments"] for each in json.loads(shared)]
    assert found == {
        "llama-70b": {
            "tensor_parallel_size": 4,
            "gpu_memory_utilization": 0.92,
            "max_num_batched_tokens": 16384,
        },
        "deepseek": {  # One rank of four, which has all GPUs of its worker.
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 2,
            "data_parallel_size": 4,
            "data_parallel_rank": 0,
        },
        "cpu": {},
        "embeddings": {},
        # The arguments of a host's model add to those of the pool.
        "shared": [
            {"tensor_parallel_size": 2, "max_num_batched_tokens": 8192},
            {"pipeline_parallel_size": 2, "max_num_batched_tokens": 8192},
        ],
    }


def test_passwords_of_bundled_servers_become_part_of_urls() -> None:
    manifests = case(CHART / "ci" / "bundled-values.yaml")
    urls = {}
    for pod in pods(manifests):
        if pod.component in {"gateway", "worker", "jobs", "beat"}:
            variables = environment(pod.containers[-1], manifests)
            urls[pod.component] = variables["SLUICE_REDIS_URL"]
        if pod.component == "gateway":
            of_gateway = variables
    users = {
        component: url.removeprefix("redis://").split(":")[0] for component, url in urls.items()
    }
    assert users == {"gateway": "gateway", "worker": "worker", "jobs": "jobs", "beat": "jobs"}
    assert len(set(urls.values())) == 3
    assert all(url.endswith("@sluice-redis:6379/0") for url in urls.values())
    assert "not-for-customers" not in str(urls)
    assert of_gateway["SLUICE_DATABASE_URL"] == (
        "postgresql+asyncpg://sluice:not-for-customers@sluice-postgresql:5432/sluice"
    )


def test_processes_can_have_separate_urls_of_an_external_redis() -> None:
    manifests = case(CHART / "ci" / "network-policy-external-values.yaml")
    urls = {
        pod.component: environment(pod.containers[-1], manifests)["SLUICE_REDIS_URL"]
        for pod in pods(manifests)
        if pod.component in {"gateway", "worker"}
    }
    assert "//worker:" in urls["worker"]
    assert "//worker:" not in urls["gateway"]


@pytest.mark.parametrize("name", ["network-policy", "cluster"])
def test_clients_of_encrypted_redis_trust_only_its_certificate(name: str) -> None:
    manifests = case(CHART / "ci" / f"{name}-values.yaml")
    asking = [
        pod for pod in pods(manifests) if pod.component in {"gateway", "worker", "jobs", "beat"}
    ]
    assert len(asking) == 4
    for pod in asking:
        url = environment(pod.containers[-1], manifests)["SLUICE_REDIS_URL"]
        assert url.startswith("rediss://"), pod.owner
        assert "ssl_cert_reqs=required" in url
        trusted = url.partition("ssl_ca_certs=")[2]
        (mount,) = [
            each
            for each in pod.containers[-1]["volumeMounts"]
            if trusted.startswith(each["mountPath"] + "/")
        ]
        (volume,) = [each for each in pod.spec["volumes"] if each["name"] == mount["name"]]
        assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


def test_every_client_of_the_database_has_the_certificate_of_its_authority() -> None:
    manifests = case(CHART / "ci" / "mesh-values.yaml")
    asking = [
        (pod, container)
        for pod in pods(manifests)
        for container in pod.containers
        if "SLUICE_DATABASE_URL" in environment(container, manifests)
    ]
    assert sorted(container["name"] for _, container in asking) == [
        *("check", "gateway", "jobs", "migration", "schema", "schema")
    ]
    for pod, container in asking:
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "database-trust"]
        assert mount["mountPath"] == "/etc/sluice/database"
        (volume,) = [each for each in pod.spec["volumes"] if each["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == "database-ca"
        assert volume["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


def test_bundled_redis_with_tls_accepts_no_other_connection() -> None:
    manifests = case(CHART / "ci" / "network-policy-values.yaml")
    (server,) = [pod for pod in pods(manifests) if pod.component == "redis"]
    (container,) = server.containers
    assert container["args"][container["args"].index("--port") + 1] == "0"
    assert "--tls" in container["readinessProbe"]["exec"]["command"]


def test_processes_of_a_cluster_have_their_own_users_and_jobs_another_broker() -> None:
    manifests = case(CHART / "ci" / "cluster-values.yaml")
    found = {
        pod.component: environment(pod.containers[-1], manifests)
        for pod in pods(manifests)
        if pod.component in {"gateway", "worker", "jobs", "beat"}
    }
    users = {"gateway": "gateway", "worker": "worker", "jobs": "jobs", "beat": "jobs"}
    for component, variables in found.items():
        address = cluster_address(variables["SLUICE_REDIS_URL"])
        assert address is not None
        assert (address.username, len(address.hosts)) == (users[component], 2)
    brokers = {name for name, each in found.items() if "SLUICE_CELERY_BROKER_URL" in each}
    assert brokers == {"jobs", "beat"}


@pytest.mark.parametrize("secret", ["SLUICE_AUDIT_KEY", "SLUICE_EXPORT_TOKENS"])
def test_only_background_jobs_have_their_secrets(secret: str) -> None:
    manifests = case(CHART / "ci" / "network-policy-values.yaml")
    knowing = {
        pod.component
        for pod in pods(manifests)
        for container in pod.containers
        if secret in environment(container, manifests)
    }
    assert knowing == {"jobs"}


def test_pool_can_override_defaults_with_zero_false_and_null() -> None:
    settings = {
        "worker.defaults.engine.contextWindow": "4096",
        "worker.defaults.podDisruptionBudget.enabled": "true",
        "worker.pools[0].gpu.count": "0",
        "worker.pools[0].drainSeconds": "0",
        "worker.pools[0].podDisruptionBudget.enabled": "false",
        "worker.pools[0].engine.contextWindow": "null",
    }
    manifests = render(CHART / "ci" / "external-values.yaml", settings=settings)
    (pod,) = [pod for pod in pods(manifests) if pod.component == "worker"]
    variables = environment(pod.containers[0], manifests)
    assert variables["SLUICE_DRAIN_SECONDS"] == "0"
    assert "nvidia.com/gpu" not in pod.containers[0]["resources"]["limits"]
    budgets = [m for m in manifests if m["kind"] == "PodDisruptionBudget"]
    assert "sluice-worker-small" not in {each["metadata"]["name"] for each in budgets}


# --- schema and README -------------------------------------------------------------------------


def test_schema_is_valid() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert list(jsonschema.Draft7Validator(SCHEMA).iter_errors(VALUES)) == []


FREE_FORM = {"podSecurityContext", "containerSecurityContext", "affinity", "arguments", "global"}
"""Objects whose fields Kubernetes or vLLM define."""


def test_schema_has_exactly_the_values() -> None:
    assert {*schema_keys(SCHEMA)} - {"global"} == {*value_keys(VALUES)}


def schema_keys(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the paths of everything in the schema, without settings and entries of lists."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    for name, each in schema.get("properties", {}).items():
        yield f"{prefix}{name}"
        if name not in {"config", "resources"}:
            yield from schema_keys(each, f"{prefix}{name}.")


def value_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return the same of values."""
    free = FREE_FORM | {"resources", "labels", "config", "podLabels", "podAnnotations"}
    for name, each in values.items():
        yield f"{prefix}{name}"
        if isinstance(each, Mapping) and name not in free:
            yield from value_keys(each, f"{prefix}{name}.")


def closed(schema: Any) -> Iterator[str]:
    """Return the properties of objects that accept unknown fields."""
    if isinstance(schema, Mapping):
        if "properties" in schema and schema.get("additionalProperties") is not False:
            yield json.dumps(schema)[:80]
        for each in schema.values():
            yield from closed(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from closed(each)


def test_schema_refuses_unknown_fields_of_the_chart() -> None:
    # Kubernetes defines the entries of extraEnv.
    assert [each for each in closed(SCHEMA) if '"name"' not in each] == []


def test_readme_and_copies_equal_the_generated_ones() -> None:
    stale = [str(path.relative_to(REPOSITORY)) for path in chart.stale_files()]
    assert stale == [], "run scripts/chart.py"


def test_readme_has_every_value_with_its_default() -> None:
    rows = {row.key: row for row in chart.read_rows((CHART / "values.yaml").read_text())}
    assert len(rows) > 150
    assert rows["gateway.drain.timeoutSeconds"].default == "1800"
    assert rows["gateway.drain.timeoutSeconds"].kind == "int"
    assert rows["worker.defaults.modelCache.accessModes"].default == '["ReadWriteMany"]'
    assert rows["redis.bundled.maxMemoryMiB"].text.endswith("docs/capacity.md needs.")
    assert all(row.text.endswith(".") for row in rows.values()), "comments are sentences"


def test_value_without_a_comment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.c has no comment"):
        list(chart.read_rows("a:\n  # -- One.\n  b: 1\n\n  # Not one.\n  c: 2\n"))


def test_comment_can_span_lines_and_describe_a_group() -> None:
    (row,) = chart.read_rows("# Above.\n# -- One\n# and more.\na:\n  b: 1\n")
    assert row == chart.Row("a", "object", '{"b": 1}', "One and more.")


def test_chart_has_the_version_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert metadata["appVersion"] == project["version"]
    changes = yaml.safe_load(metadata["annotations"]["artifacthub.io/changes"])
    assert {change["kind"] for change in changes} <= {"added", "changed", "fixed", "removed"}
