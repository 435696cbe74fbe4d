"""The rendered chart: valid, restricted, without plain secrets, and consistent."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from gateway.platform.outbound.addresses import is_public
from scripts.release import project
from tests.deploy.crd_shapes import SHAPES
from tests.deploy.helm import (
    CASES,
    CHART,
    OWN_API_GROUPS,
    PodTemplate,
    case,
    environment,
    helm,
    named,
    of_kind,
    pod_of,
    pods,
    render,
    template,
)
from tests.support.cases import all_cases
from tests.support.secrets import scan_for_secrets

VERSION = project()["version"]
KUBERNETES = ("1.27", "1.34")
"""The oldest version that Chart.yaml accepts, and a later one."""


def name_of(file: Path) -> str:
    """Return the name of a file of values."""
    return file.name.removesuffix("-values.yaml")


each_case = all_cases("file", CASES, ids=name_of)
BUNDLED = CHART / "ci" / "bundled-values.yaml"
EXTERNAL = CHART / "ci" / "external-values.yaml"
GPU_POOLS = CHART / "ci" / "gpu-pools-values.yaml"
INGRESS = CHART / "ci" / "ingress-values.yaml"
MESH = CHART / "ci" / "mesh-values.yaml"
"""Its migration has a sidecar, which needs Kubernetes 1.29."""
OPENSHIFT = CHART / "ci" / "openshift-values.yaml"


@pytest.mark.parametrize(
    "file",
    [
        BUNDLED,
        GPU_POOLS,
        *(
            pytest.param(file, marks=pytest.mark.long)
            for file in CASES
            if file not in {BUNDLED, GPU_POOLS}
        ),
    ],
    ids=name_of,
)
def test_lint_finds_nothing(file: Path) -> None:
    result = helm("lint", "--strict", CHART, "--values", file)
    assert result.returncode == 0, result.stdout
    assert "[WARNING]" not in result.stdout
    assert "[ERROR]" not in result.stdout


@each_case
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_valid(file: Path, version: str) -> None:
    manifests = case(file)
    assert len(manifests) > 8
    for manifest in manifests:
        if not (file == MESH and manifest["kind"] == "Job" and version == KUBERNETES[0]):
            validate(json.dumps(manifest), version)


@cache
def validate(text: str, version: str) -> None:
    """Check an object against its schema. Cached: most cases share most objects."""
    manifest = json.loads(text)
    if manifest["apiVersion"].rpartition("/")[0] in OWN_API_GROUPS:
        kubernetes().validate(manifest, version, strict=True)
    else:
        shape = SHAPES[manifest["apiVersion"], manifest["kind"]]
        jsonschema.Draft7Validator(shape).validate(manifest["spec"])


@cache
def kubernetes() -> Any:
    """Return the validator; cached, since reading megabytes of schemas is slow."""
    import kubernetes_validate.utils as validator

    validator.schema_contents = cache(validator.schema_contents)
    return validator


def test_invalid_object_is_detected() -> None:
    service, *_ = of_kind(case(EXTERNAL), "Service")
    wrong = json.loads(json.dumps(service))
    wrong["spec"]["ports"][0]["ports"] = 80
    with pytest.raises(jsonschema.ValidationError, match="ports"):
        validate(json.dumps(wrong), KUBERNETES[0])


@each_case
def test_names_are_unique(file: Path) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in case(file)]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)
    assert all("namespace" not in each["metadata"] for each in case(file))


def test_longest_names_still_fit() -> None:
    settings = {"fullnameOverride": "a" * 50, "worker.pools[0].name": "b" * 20}
    manifests = render(GPU_POOLS, settings=settings | {"worker.pools[0].model.path": "/models/m"})
    assert max(len(each["metadata"]["name"]) for each in manifests) <= 63


@each_case
def test_every_pod_is_restricted(file: Path) -> None:
    found = list(pods(case(file)))
    assert len(found) >= 4
    for pod in found:
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True, pod.owner
        for name in ("runAsUser", "runAsGroup", "fsGroup"):
            assert (name not in context) if file == OPENSHIFT else (context[name] >= 999), pod.owner
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, pod.owner
        assert pod.spec["automountServiceAccountToken"] is False, pod.owner
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys(), pod.owner
        for volume in pod.spec["volumes"]:
            assert volume.keys() <= {
                "name",
                "emptyDir",
                "configMap",
                "secret",
                "persistentVolumeClaim",
            }, pod.owner
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, pod.owner
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"], pod.owner


@each_case
def test_services_do_not_set_environment_variables(file: Path) -> None:
    # A Service named `sluice` would set SLUICE_PORT=tcp://... in every pod.
    for pod in pods(case(file)):
        assert pod.spec["enableServiceLinks"] is False, pod.owner


@each_case
def test_each_variable_is_set_once(file: Path) -> None:
    for pod in pods(case(file)):
        for container in pod.containers:
            names = [variable["name"] for variable in container.get("env", [])]
            assert len(names) == len(set(names)), pod.owner


@each_case
def test_every_image_is_pinned(file: Path) -> None:
    for pod in pods(case(file)):
        for container in pod.containers:
            repository, _, tag = container["image"].rpartition(":")
            assert "/" in repository, container["image"]
            assert tag not in {"", "latest"}, container["image"]


def test_image_tag_defaults_to_the_version_of_the_chart() -> None:
    pod = pod_of(case(EXTERNAL), "gateway")
    assert [c["image"] for c in pod.containers] == [f"ghcr.io/sluice/gateway:{VERSION}"] * 2
    scheduled = case(CHART / "ci" / "scheduling-values.yaml")
    gateway, worker = pod_of(scheduled, "gateway"), pod_of(scheduled, "worker", pool="chat")
    assert gateway.containers[0]["image"].startswith(
        "registry.example.com/sluice/gateway@sha256:01"
    )
    assert worker.containers[0]["image"] == "registry.example.com/sluice/worker-gpu:0.1.0-rc.1"


# --- secrets -----------------------------------------------------------------------------------

MARKERS = {
    "cacheSalt.value": "marker-of-the-cache-salt",
    "redis.bundled.password": "marker-of-the-redis-password",
    "database.bundled.password": "marker-of-the-database-password",
}
URL_MARKERS = {
    "cacheSalt.value": "marker-of-the-cache-salt",
    "redis.url": "redis://:marker-of-the-redis-password@redis/0",
    "database.url": "postgresql+asyncpg://sluice:marker-of-the-database-password@postgres/sluice",
}


@all_cases(
    ("file", "settings"),
    [(BUNDLED, MARKERS), (CHART / "ci" / "urls-values.yaml", URL_MARKERS)],
    ids=["bundled", "urls"],
)
@all_cases("options", [(), ("--is-upgrade",)], ids=["install", "upgrade"])
def test_secrets_occur_only_in_secret_objects(
    file: Path, settings: Mapping[str, str], options: tuple[str, ...]
) -> None:
    manifests = render(file, settings=settings, options=options)
    markers = list(settings.values())
    assert scan_for_secrets({"all": json.dumps(manifests)}, markers)
    open_ones = {
        f"{each['kind']} {each['metadata']['name']}": json.dumps(each)
        for each in manifests
        if each["kind"] != "Secret"
    }
    assert scan_for_secrets(open_ones, markers) == []


@each_case
def test_secret_variables_only_refer_to_secrets(file: Path) -> None:
    markers = ("PASSWORD", "SECRET", "HF_TOKEN", "_URL", "HEADERS", "REDISCLI_AUTH", "_KEYS")
    for pod in pods(case(file)):
        for container in pod.containers:
            for variable in container.get("env", []):
                if variable["name"].endswith(markers) and variable["name"] != "AWS_ENDPOINT_URL":
                    value = variable.get("value")
                    assert value is None or "$(" in value, (pod.owner, variable["name"])


@each_case
def test_config_maps_have_no_secret_settings(file: Path) -> None:
    for each in of_kind(case(file), "ConfigMap"):
        assert (
            not {"SLUICE_REDIS_URL", "SLUICE_DATABASE_URL", "SLUICE_JWT_SECRET"}
            & each["data"].keys()
        )


def test_changed_secret_and_setting_restart_pods() -> None:
    before = render(BUNDLED)
    for changed in ({"cacheSalt.value": "another-text-of-mine"}, {"config.maxPrompts": "7"}):
        after = render(BUNDLED, settings=changed)
        for component in ("gateway", "jobs", "beat"):
            assert pod_of(before, component).annotations != pod_of(after, component).annotations


# --- labels ------------------------------------------------------------------------------------


@each_case
def test_selectors_match_only_their_own_pods(file: Path) -> None:
    templates = list(pods(case(file)))
    for each in case(file):
        kind, spec = each["kind"], each.get("spec", {})
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "sluice"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        if kind in {"Deployment", "StatefulSet"}:
            selector = spec["selector"]["matchLabels"]
            assert selected(selector, templates) == [f"{kind} {each['metadata']['name']}"]
            assert "helm.sh/chart" not in selector
            assert "app.kubernetes.io/version" not in selector
        elif kind in {"PodDisruptionBudget", "ServiceMonitor"}:
            assert len(selected(spec["selector"]["matchLabels"], templates)) == 1
        elif kind == "NetworkPolicy":
            assert selected(spec["podSelector"]["matchLabels"], templates)
        elif kind == "Service":
            assert len(selected(spec["selector"], templates)) == 1


def selected(selector: Mapping[str, str], templates: list[PodTemplate]) -> list[str]:
    """Return the owners of the pods that a selector matches."""
    return [pod.owner for pod in templates if selector.items() <= pod.labels.items()]


def test_custom_labels_do_not_change_selectors() -> None:
    settings = {"gateway.podLabels.app\\.kubernetes\\.io/component": "other"}
    assert (
        pod_of(render(EXTERNAL, settings=settings), "gateway").owner == "Deployment sluice-gateway"
    )


def ports(manifests: Any) -> Iterator[tuple[str, str]]:
    """Return component and name of every port that a container opens."""
    for pod in pods(manifests):
        for container in pod.containers:
            yield from ((pod.component, port["name"]) for port in container.get("ports", []))


@each_case
def test_probes_services_and_monitors_use_open_ports(file: Path) -> None:
    manifests = case(file)
    opened = set(ports(manifests))
    for pod in pods(manifests):
        for container in pod.containers:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                get = container.get(probe, {}).get("httpGet")
                assert get is None or (pod.component, get["port"]) in opened
    for service in of_kind(manifests, "Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        for port in service["spec"]["ports"]:
            assert (component, port["targetPort"]) in opened
    for monitor in of_kind(manifests, "PodMonitor"):
        names = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        assert names <= {name for _, name in opened}


# --- availability ------------------------------------------------------------------------------


def test_grace_periods_cover_the_drains() -> None:
    manifests = case(GPU_POOLS)
    gateway = pod_of(manifests, "gateway").spec
    # 10 s + 1800 s, and the gateway's time to exit.
    assert gateway["terminationGracePeriodSeconds"] == 1825
    worker = pod_of(manifests, "worker", pool="llama-70b").spec
    assert worker["terminationGracePeriodSeconds"] == 630
    assert pod_of(manifests, "worker", pool="cpu").spec["terminationGracePeriodSeconds"] == 330
    assert pod_of(manifests, "worker", pool="shared").spec["terminationGracePeriodSeconds"] == 50


def test_replicas_are_left_to_autoscalers() -> None:
    fixed = of_kind(case(GPU_POOLS), "Deployment")
    assert all("replicas" in each["spec"] for each in fixed)
    scaled = {
        each["metadata"]["name"]: each["spec"]
        for each in of_kind(case(CHART / "ci" / "autoscaling-values.yaml"), "Deployment")
    }
    assert "replicas" not in scaled["sluice-gateway"]
    assert "replicas" not in scaled["sluice-worker-chat"]
    assert scaled["sluice-jobs"]["replicas"] == 2


def test_gateways_are_replaced_without_a_gap() -> None:
    strategy = named(case(EXTERNAL), "Deployment", "sluice-gateway")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_public_routes_have_the_configured_paths() -> None:
    (whole,) = of_kind(case(INGRESS), "Ingress")
    assert {path["path"] for path in whole["spec"]["rules"][0]["http"]["paths"]} == {"/"}
    settings = {"gateway.ingress.paths[0]": "/v1", "gateway.ingress.paths[1]": "/tokenize"}
    (ingress,) = of_kind(render(INGRESS, settings=settings), "Ingress")
    (route,) = of_kind(case(CHART / "ci" / "gateway-api-values.yaml"), "HTTPRoute")
    paths = [path["path"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
    assert set(paths) == {"/v1", "/tokenize"}
    assert [each["path"]["value"] for each in route["spec"]["rules"][0]["matches"]] == ["/"]


@pytest.mark.parametrize(
    ("file", "settings", "url"),
    [
        (INGRESS, {}, "https://api.example.com"),
        (INGRESS, {"gateway.ingress.tls": "null"}, "http://api.example.com"),
        (INGRESS, {"gateway.ingress.hosts[0]": "*.example.com"}, None),
        (INGRESS, {"config.publicUrl": "https://other.example"}, "https://other.example"),
        (CHART / "ci" / "gateway-api-values.yaml", {}, "https://api.example.com"),
        (BUNDLED, {}, None),
    ],
)
def test_public_url_is_that_of_the_route(
    file: Path, settings: Mapping[str, str], url: str | None, tmp_path: Path
) -> None:
    """Cookies are `Secure` if it has https."""
    found = named(render(file, settings=settings), "ConfigMap", "sluice")
    assert found["data"].get("SLUICE_PUBLIC_URL") == url
    shown = notes(file, settings, tmp_path)
    assert f"{url or 'http://127.0.0.1:8080'}/console" in shown
    assert "keys create --tenant operators --name first --scope admin" in shown
    assert "http://127.0.0.1:9463/console" in shown
    has_route = file != BUNDLED
    assert ("set config.trustedProxies" in shown) == (has_route and file != INGRESS)
    assert ("set files.store" in shown) == has_route


def notes(file: Path, settings: Mapping[str, str], folder: Path) -> str:
    """Return the notes. Helm renders them only for an installation, so here they are a template."""
    chart = shutil.copytree(CHART, folder / "chart")
    text = (chart / "templates" / "NOTES.txt").rename(chart / "templates" / "notes.yaml")
    options = [word for pair in settings.items() for word in ("--set", "=".join(pair))]
    return helm(
        *("template", "sluice", chart, "--values", file, *options),
        *("--show-only", f"templates/{text.name}", "--debug"),
    ).stdout


@all_cases(
    ("settings", "warnings"),
    [
        ({}, 0),
        ({"gateway.ingress.annotations": "null"}, 3),
        ({"gateway.ingress.annotations": "null", "gateway.ingress.className": "traefik"}, 0),
    ],
    ids=["annotated", "plain", "traefik"],
)
def test_notes_warn_of_what_nginx_does_to_streams_and_uploads(
    settings: Mapping[str, str], warnings: int, tmp_path: Path
) -> None:
    shown = notes(INGRESS, settings, tmp_path / str(len(str(settings))))
    assert "keys create --tenant operators" in shown
    assert shown.count("By default, nginx") == warnings


def test_bundled_files_are_one_volume_of_gateways_and_background_jobs() -> None:
    manifests = case(BUNDLED)
    claim = named(manifests, "PersistentVolumeClaim", "sluice-files")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    for component in ("gateway", "jobs"):
        [pod] = [each for each in pods(manifests) if each.component == component]
        [volume] = [each for each in pod.spec["volumes"] if each["name"] == "files"]
        assert volume["persistentVolumeClaim"]["claimName"] == "sluice-files"
        assert (
            environment(pod.containers[-1], manifests)["SLUICE_FILE_STORE"]
            == "/var/lib/sluice/files"
        )


@each_case
def test_no_public_route_leads_to_the_operators_port(file: Path) -> None:
    manifests = case(file)
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "Service")}
    (name,) = [name for name in services if name.endswith("-gateway-operators")]
    operators = services.pop(name)
    assert operators["type"] == "ClusterIP"
    assert all(port["targetPort"].startswith("operators") for port in operators["ports"])
    assert "operators" not in json.dumps(services)
    for each in (*of_kind(manifests, "Ingress"), *of_kind(manifests, "HTTPRoute")):
        assert "operators" not in json.dumps(each["spec"])


# --- pools -------------------------------------------------------------------------------------


def test_pools_have_their_gpus_and_defaults() -> None:
    manifests = case(GPU_POOLS)
    large, cpu = (pod_of(manifests, "worker", pool=name).spec for name in ("llama-70b", "cpu"))
    resources = large["containers"][0]["resources"]
    assert resources["limits"] == {"memory": "32Gi", "nvidia.com/gpu": 4}
    assert resources["requests"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 4}
    assert large["runtimeClassName"] == "nvidia"
    assert large["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "nvidia.com/gpu" not in cpu["containers"][0]["resources"]["limits"]
    assert cpu["containers"][0]["image"] == f"ghcr.io/sluice/worker-cpu:{VERSION}"
    budgets = {each["metadata"]["name"] for each in of_kind(manifests, "PodDisruptionBudget")}
    assert "sluice-worker-llama-70b" in budgets
    assert "sluice-worker-cpu" not in budgets


def test_model_volumes() -> None:
    manifests = case(GPU_POOLS)
    claim, _ = of_kind(manifests, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"

    def volume(pool: str) -> Any:
        spec = pod_of(manifests, "worker", pool=pool).spec
        (found,) = [each for each in spec["volumes"] if each["name"] == "models"]
        return found

    claimed = {"claimName": claim["metadata"]["name"]}
    assert volume("llama-70b") == {"name": "models", "persistentVolumeClaim": claimed}
    existing = {"claimName": "models", "readOnly": True}
    assert volume("deepseek") == {"name": "models", "persistentVolumeClaim": existing}
    assert volume("cpu") == {"name": "models", "emptyDir": {"sizeLimit": "100Gi"}}


def test_chat_template_is_passed_unchanged() -> None:
    config = named(case(GPU_POOLS), "ConfigMap", "sluice-worker-llama-70b")
    text = (
        "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}{%- endfor %}\n"
    )
    assert [*config["data"].values()] == [text]


def test_no_pool_installs_gateways_alone() -> None:
    manifests = case(CHART / "ci" / "jwt-values.yaml")
    assert {pod.component for pod in pods(manifests)} == {
        "gateway",
        "jobs",
        "beat",
        "migration",
        "test",
    }


# --- installing and upgrading ------------------------------------------------------------------

HOOK = "helm.sh/hook"


@all_cases("file", [BUNDLED, EXTERNAL], ids=["bundled", "external"])
def test_first_installation_has_no_hook_to_wait_for(file: Path) -> None:
    hooks = {
        each["metadata"]["name"]
        for each in case(file)
        if HOOK in (each["metadata"].get("annotations") or {})
    }
    assert hooks == {"sluice-test-gateway"}
    for component in ("gateway", "jobs"):
        (waiting,) = pod_of(case(file), component).spec["initContainers"]
        assert waiting["args"] == ["db", "status"]


@all_cases("file", [BUNDLED, EXTERNAL], ids=["bundled", "external"])
def test_upgrade_migrates_first_with_the_objects_of_the_hook(file: Path) -> None:
    manifests = render(file, options=("--is-upgrade",))
    hooks = {
        f"{each['kind']} {each['metadata']['name']}": each
        for each in manifests
        if each["metadata"].get("annotations", {}).get(HOOK) == "pre-upgrade"
    }
    (job,) = [each for each in hooks.values() if each["kind"] == "Job"]
    (pod,) = pods([job])
    needed = {
        f"ServiceAccount {pod.spec['serviceAccountName']}",
        "NetworkPolicy sluice-migration",
    }
    for variable in pod.containers[0]["env"]:
        secret = variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name")
        if secret is not None and file == BUNDLED:
            needed.add(f"Secret {secret}")
    assert hooks.keys() - {f"Job {job['metadata']['name']}"} == needed
    weight = "helm.sh/hook-weight"
    for name in needed:
        annotations = hooks[name]["metadata"]["annotations"]
        assert int(annotations[weight]) < int(job["metadata"]["annotations"][weight])


@all_cases(
    "changed",
    [
        {"image.tag": "another"},
        {"migration.extraEnv[0].name": "TZ", "migration.extraEnv[0].value": "UTC"},
        {"migration.resources.limits.memory": "1Gi"},
        {"podSecurityContext.runAsUser": "10002"},
    ],
    ids=["image", "environment", "resources", "user"],
)
def test_another_pod_gets_another_migration_job(changed: Mapping[str, str]) -> None:
    """The pod of a Job is immutable, so `kubectl apply` would refuse the change."""
    (first,) = of_kind(case(EXTERNAL), "Job")
    (second,) = of_kind(render(EXTERNAL, settings=changed), "Job")
    (again,) = of_kind(render(EXTERNAL, settings={"metrics.scrapeAnnotations": "true"}), "Job")
    assert first["metadata"]["name"] != second["metadata"]["name"]
    assert first == again


def test_everything_that_the_migration_needs_is_synchronized_before_it() -> None:
    """Argo CD renders each release as the first one, so the annotations of its hooks are values."""
    annotation = {"argocd.argoproj.io/hook": "PreSync"}
    manifests = render(
        CHART / "ci" / "urls-values.yaml",
        settings={
            "serviceAccount.create": "true",
            "migration.annotations.argocd\\.argoproj\\.io/hook": "PreSync",
        },
    )
    hooks = {
        each["kind"]: each["metadata"]["labels"]["app.kubernetes.io/component"]
        for each in manifests
        if annotation.items() <= (each["metadata"].get("annotations") or {}).items()
    }
    needed = ("Job", "ServiceAccount", "Secret", "NetworkPolicy")
    assert hooks == dict.fromkeys(needed, "migration")


def test_no_sidecar_keeps_the_migration_alive() -> None:
    pod = pod_of(case(EXTERNAL), "migration")
    assert pod.labels["sidecar.istio.io/inject"] == "false"
    assert pod.annotations["linkerd.io/inject"] == "disabled"
    meshed = pod_of(case(MESH), "migration")
    assert meshed.labels["sidecar.istio.io/inject"] == "true"
    # Kubernetes ends an init container that always restarts after the pod's other containers.
    (sidecar,) = meshed.spec["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("database-proxy", "Always")
    refused = template(MESH, options=("--kube-version", "1.28.0"))
    assert "migration.sidecars: Kubernetes 1.29 or newer is required" in refused.stderr


# --- monitoring --------------------------------------------------------------------------------


def test_rules_and_dashboards_are_rendered_unchanged(tmp_path: Path) -> None:
    chart = tmp_path / "sluice"
    for file in CHART.rglob("*"):
        if file.is_file() and file.parent.name not in {"rules", "dashboards"}:
            target = chart / file.relative_to(CHART)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    (chart / "rules").mkdir()
    (chart / "rules" / "sluice.yaml").write_text(
        "groups:\n  - name: sluice\n    rules:\n      - alert: Down\n        expr: up == 0\n"
        "        annotations:\n          summary: '{{ $labels.pod }} is down'\n"
    )
    dashboard = {"uid": "overview", "title": "a {{ thing }} with\nlines"}
    (chart / "dashboards").mkdir()
    (chart / "dashboards" / "overview.json").write_text(json.dumps(dashboard, indent=2))
    result = helm("template", "sluice", chart, "--values", CHART / "ci" / "monitoring-values.yaml")
    assert result.returncode == 0, result.stderr
    manifests = list(yaml.safe_load_all(result.stdout))
    (rule,) = of_kind(manifests, "PrometheusRule")
    (alert,) = rule["spec"]["groups"][0]["rules"]
    assert alert["annotations"]["summary"] == "{{ $labels.pod }} is down"
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    jsonschema.Draft7Validator(SHAPES["monitoring.coreos.com/v1", "PrometheusRule"]).validate(
        rule["spec"]
    )
    config = named(manifests, "ConfigMap", "sluice-dashboard-overview")
    assert json.loads(config["data"]["overview.json"]) == dashboard
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["metadata"]["annotations"] == {"grafana_folder": "Sluice"}


def test_links_use_the_configured_runbook_url() -> None:
    manifests = case(CHART / "ci" / "monitoring-values.yaml")
    rules = [
        rule
        for each in of_kind(manifests, "PrometheusRule")
        for group in each["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert rules
    for rule in rules:
        link = f"https://wiki.example.org/sluice/{rule['alert']}.md"
        assert rule["annotations"]["runbook_url"] == link
    dashboards = [each for each in manifests if "-dashboard-" in each["metadata"]["name"]]
    assert "https://wiki.example.org/sluice/SluiceQueueSlow.md" in str(dashboards)
    assert "sluice.example.com" not in str(dashboards)


def test_background_jobs_know_the_people_whose_batches_they_validate() -> None:
    manifests = case(CHART / "ci" / "oidc-values.yaml")
    jobs, gateway = (
        environment(pod_of(manifests, name).containers[-1], manifests)
        for name in ("jobs", "gateway")
    )
    assert jobs["SLUICE_JWT_ISSUER"] == gateway["SLUICE_OIDC_ISSUER"]
    assert jobs["SLUICE_OIDC_ROLES"] == gateway["SLUICE_OIDC_ROLES"]
    assert jobs["SLUICE_JWT_ROLE_CLAIM"] == gateway["SLUICE_OIDC_ROLE_CLAIM"]


def test_series_of_workers_have_labels_of_pool_and_model() -> None:
    manifests = case(CHART / "ci" / "monitoring-values.yaml")
    monitor = named(manifests, "PodMonitor", "sluice-worker")
    labels = {
        endpoint["port"]: {each["targetLabel"] for each in endpoint["relabelings"]}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    }
    assert labels == {"health": {"job", "pool", "model"}, "hosted": {"job", "pool"}}
    pod = pod_of(manifests, "worker", pool="chat")
    assert pod.annotations["sluice.io/model"] == "Llama-3.1-8B-Instruct"
    # The model of a host changes.
    assert "sluice.io/model" not in pod_of(manifests, "worker", pool="shared").annotations


def test_each_process_of_a_gateway_has_an_operators_port_that_is_scraped() -> None:
    manifests = case(CHART / "ci" / "monitoring-values.yaml")
    [container] = named(manifests, "Deployment", "sluice-gateway")["spec"]["template"]["spec"][
        "containers"
    ]
    ports = {"operators": 9463, "operators-2": 9464}
    assert {each["name"]: each["containerPort"] for each in container["ports"]} == {
        "http": 8080,
        **ports,
    }
    service = named(manifests, "Service", "sluice-gateway-operators")["spec"]["ports"]
    assert {each["targetPort"]: each["port"] for each in service} == ports
    monitor = named(manifests, "ServiceMonitor", "sluice-gateway")["spec"]["endpoints"]
    assert [each["port"] for each in monitor] == [*ports]


def test_job_labels_equal_those_of_the_rules() -> None:
    manifests = case(CHART / "ci" / "monitoring-values.yaml")
    given = {
        rule.get("replacement", "$1"): rule.get("sourceLabels")
        for kind, endpoints in (
            ("ServiceMonitor", "endpoints"),
            ("PodMonitor", "podMetricsEndpoints"),
        )
        for monitor in of_kind(manifests, kind)
        for endpoint in monitor["spec"][endpoints]
        for rule in endpoint["relabelings"]
        if rule["targetLabel"] == "job"
    }
    component = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
    assert given == {
        "sluice-gateway": None,
        "sluice-worker": None,
        "hosted-worker": None,
        "sluice-$1": [component],
    }
    rules = str(of_kind(manifests, "PrometheusRule"))
    assert set(re.findall(r'job="(sluice-[^"]+)"', rules)) == {"sluice-gateway", "sluice-worker"}


def test_annotations_name_the_metrics_port() -> None:
    manifests = case(CHART / "ci" / "annotations-values.yaml")
    ports = {
        pod.component: pod.annotations.get("prometheus.io/port")
        for pod in pods(manifests)
        if pod.component not in {"migration", "test"}
    }
    assert ports == {"gateway": "9463", "worker": "9465", "jobs": "9464", "beat": "9464"}


# --- network -----------------------------------------------------------------------------------


def test_network_policies_allow_only_required_connections() -> None:
    manifests = case(CHART / "ci" / "network-policy-values.yaml")
    reachable = {
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: {
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in each["spec"]["egress"]
            for peer in rule.get("to", [])
            if "podSelector" in peer
        }
        for each in of_kind(manifests, "NetworkPolicy")
    }
    assert reachable == {
        "gateway": {"redis", "postgresql"},
        "worker": {"redis"},
        "jobs": {"redis", "postgresql"},
        "beat": {"redis"},
        "migration": {"postgresql"},
        "redis": set(),
        "postgresql": set(),
    }
    worker = named(manifests, "NetworkPolicy", "sluice-worker")
    assert all("ipBlock" not in json.dumps(rule) for rule in worker["spec"]["egress"])


@each_case
def test_network_policies_are_on_by_default_and_restrict_ports(file: Path) -> None:
    manifests = case(file)
    policies = of_kind(manifests, "NetworkPolicy")
    components = {pod.component for pod in pods(manifests)} - {"test"}
    assert {
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for each in policies
    } == components
    for each in policies:
        for rule in (*each["spec"]["ingress"], *each["spec"]["egress"]):
            assert rule["ports"], each["metadata"]["name"]
    opened = {
        (pod.component, port["containerPort"])
        for pod in pods(manifests)
        for container in pod.containers
        for port in container.get("ports", [])
    }
    assert opened == {
        (each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"], port["port"])
        for each in policies
        for rule in each["spec"]["ingress"]
        for port in rule["ports"]
    }


def test_metrics_and_admin_api_are_open_to_the_configured_clients() -> None:
    named_peers = case(CHART / "ci" / "network-policy-values.yaml")
    policy = named(named_peers, "NetworkPolicy", "sluice-gateway")
    by_port = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]}
    namespaces = {
        port: [
            peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            for peer in peers
            if "namespaceSelector" in peer
        ]
        for port, peers in by_port.items()
    }
    assert namespaces == {8080: ["ingress-nginx"], 9463: ["monitoring", "operations"]}
    # Unless values name clients: every pod of the cluster, and no other client.
    unnamed = named(case(EXTERNAL), "NetworkPolicy", "sluice-gateway")["spec"]["ingress"]
    assert unnamed == [
        {"ports": [{"protocol": "TCP", "port": 8080}]},
        {"ports": [{"protocol": "TCP", "port": 9463}], "from": [{"namespaceSelector": {}}]},
    ]


@all_cases(
    "address",
    [
        *("1.1.1.1", "8.8.8.8", "2606:4700::1111", "2001:4860:4860::8888"),
        *("0.0.0.1", "10.0.0.1", "100.64.0.1", "127.0.0.1", "168.63.129.16", "169.254.169.254"),
        *("172.16.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1"),
        *("198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::1", "fc00::1", "fe80::1", "ff02::1", "64:ff9b::a00:1", "::ffff:10.0.0.1"),
        *("2001::1", "2001:db8::1", "2002:a00:1::1", "3fff::1", "100::1"),
    ],
)
def test_network_policies_allow_client_urls_only_to_public_addresses(address: str) -> None:
    jobs = named(case(EXTERNAL), "NetworkPolicy", "sluice-jobs")
    (rule,) = [each for each in jobs["spec"]["egress"] if "ipBlock" in json.dumps(each)]
    assert [port["port"] for port in rule["ports"]] == [443, 8443]
    parsed = ip_address(address)

    def contains(network: str) -> bool:
        known = ip_network(network)
        return parsed.version == known.version and parsed in known

    blocks = [peer["ipBlock"] for peer in rule["to"]]
    is_reached = any(
        contains(block["cidr"]) and not any(map(contains, block["except"])) for block in blocks
    )
    # An IPv4 address within an IPv6 one passes through a translator, which the policy cannot match.
    assert is_reached == (is_public(address) and "ff9b" not in address)


def test_servers_accept_exactly_the_pods_that_need_them() -> None:
    manifests = case(CHART / "ci" / "network-policy-values.yaml")

    def let_in(server: str) -> set[str]:
        (rule,) = named(manifests, "NetworkPolicy", f"sluice-{server}")["spec"]["ingress"]
        (peer,) = rule["from"]
        (expression,) = peer["podSelector"]["matchExpressions"]
        return set(expression["values"])

    assert let_in("redis") == {"gateway", "worker", "jobs", "beat", "test"}
    assert let_in("postgresql") == {"gateway", "jobs", "migration", "test"}
