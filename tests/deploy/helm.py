"""The chart as the real Helm renders it, and the processes of its pods."""

import base64
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.stack import REPOSITORY

CHART: Final = REPOSITORY / "deploy" / "helm" / "sluice"
HELM: Final = Path(sys.executable).with_name("helm")
CASES: Final = tuple(sorted((CHART / "ci").glob("*-values.yaml")))
"""Values that use one feature each."""
RELEASE: Final = "sluice"
NAMESPACE: Final = "inference"
OWN_API_GROUPS: Final = frozenset(
    {"", "apps", "autoscaling", "batch", "networking.k8s.io", "policy"}
)
"""API groups of Kubernetes that the chart uses; others need a custom resource definition."""
SECRETS: Final = {
    "redis-url": "redis://:made-up-1@redis.example.com:6379/0",
    "url": "redis://:made-up-2@redis.example.com:6379/1",
    "celery-broker-url": "redis://:made-up-3@broker.example.com:6379/0",
    "database-url": "postgresql+asyncpg://sluice:made-up-4@postgres.example.com/sluice",
    "cache-salt": "made-up-5-cache-salt",
    "access-key-id": "made-up-12",
    "secret-access-key": "made-up-13",
    "redis-password": "made-up-6",
    "redis-gateway-password": "made-up-6-gateway",
    "redis-worker-password": "made-up-6-worker",
    "redis-jobs-password": "made-up-6-jobs",
    "worker-redis-url": "redis://worker:made-up-1@redis.example.com:6379/0",
    **{
        f"{role}-cluster-url": (
            f"rediss://{role}:made-up-15@redis-0.redis,redis-1.redis?cluster=true"
            "&ssl_cert_reqs=required&ssl_ca_certs=/etc/sluice/redis/ca.crt"
        )
        for role in ("gateway", "worker", "jobs")
    },
    "export-tokens": "stripe=made-up-14",
    "smtp-url": "smtp://mail.example.com:587",
    "audit-key": "made-up-11-which-has-at-least-32-bytes",
    "postgresql-password": "made-up-7",
    "oidc-client-secret": "made-up-oidc",
    "jwt-secret": "made-up-8-which-has-at-least-32-bytes",
    "token": "made-up-9",
    "otlp-headers": "authorization=made-up-10",
    "encryption-keys": base64.b64encode(b"made-up-11".ljust(32)).decode(),
}
"""Values of existing Secrets, by key."""

Manifest = Mapping[str, Any]

_FRACTION: Final = re.compile(r"\d+\.\d+")


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A pod of an object, or the object itself."""

    owner: str
    """Kind and name of the object."""
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def component(self) -> str:
        """The pod's component: `gateway`, `worker`, ..."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        """Every container, init containers first."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


@cache
def helm(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run Helm; cached by arguments, since the chart does not change meanwhile."""
    command = [str(argument) for argument in (HELM, *arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def template(
    *values: Path, settings: Mapping[str, str] | None = None, options: Sequence[str] = ()
) -> "subprocess.CompletedProcess[str]":
    """Run `helm template` with files of values and single ones (`a.b[0].c`), read as by --set."""
    arguments: list[str | Path] = ["template", RELEASE, CHART, "--namespace", NAMESPACE, *options]
    for file in values:
        arguments += ["--values", file]
    for name, value in (settings or {}).items():
        # --set reads a fraction as text.
        arguments += ["--set-json" if _FRACTION.fullmatch(value) else "--set", f"{name}={value}"]
    return helm(*arguments)


def render(
    *values: Path, settings: Mapping[str, str] | None = None, options: Sequence[str] = ()
) -> tuple[Manifest, ...]:
    """Return the objects that `template` renders; fail if the values are refused."""
    result = template(*values, settings=settings, options=options)
    assert result.returncode == 0, result.stderr
    return _read(result.stdout)


@cache
def _read(text: str) -> tuple[Manifest, ...]:
    # libyaml reads a chart in a sixth of the time.
    return tuple(each for each in yaml.load_all(text, yaml.CSafeLoader) if each is not None)


def case(file: Path) -> tuple[Manifest, ...]:
    """Return the objects that a file of values renders."""
    return render(file)


def of_kind(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    """Return the objects of one kind."""
    return [each for each in manifests if each["kind"] == kind]


def named(manifests: Sequence[Manifest], kind: str, name: str) -> Any:
    """Return one object."""
    (found,) = [each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name]
    return found


def pods(manifests: Sequence[Manifest]) -> Iterator[PodTemplate]:
    """Return every pod of the objects."""
    for each in manifests:
        owner = f"{each['kind']} {each['metadata']['name']}"
        pod = each if each["kind"] == "Pod" else each.get("spec", {}).get("template")
        if isinstance(pod, Mapping) and "spec" in pod:
            metadata = pod["metadata"]
            yield PodTemplate(
                owner, metadata["labels"], metadata.get("annotations") or {}, pod["spec"]
            )


def pod_of(
    manifests: Sequence[Manifest], component: str, *, pool: str | None = None
) -> PodTemplate:
    """Return the pod of a component, or of a worker pool by its name."""
    (found,) = [
        pod
        for pod in pods(manifests)
        if pod.component == component and pod.labels.get("sluice.io/pool") == pool
    ]
    return found


def environment(
    container: Mapping[str, Any],
    manifests: Sequence[Manifest],
    *,
    secrets: Mapping[str, str] = SECRETS,
) -> dict[str, str]:
    """Return a container's environment as Kubernetes would make it.

    Secrets that are not among the manifests have the values of `secrets`. Raises KeyError for a
    reference to nothing.
    """
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        variables |= named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container.get("env", []):
        if "value" in variable:
            value = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], variable["value"])
        else:
            reference = variable["valueFrom"]["secretKeyRef"]
            value = _secret(manifests, reference["name"]).get(reference["key"], "")
            value = value or secrets[reference["key"]]
        variables[variable["name"]] = value
    return variables


def _secret(manifests: Sequence[Manifest], name: str) -> Mapping[str, str]:
    for each in of_kind(manifests, "Secret"):
        if each["metadata"]["name"] == name:
            data: Mapping[str, str] = each["stringData"]
            return data
    return {}
