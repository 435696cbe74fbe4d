"""docker-compose.yml: valid, pinned, confined, and with only settings that the processes accept."""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from opentelemetry.sdk import environment_variables
from pydantic_settings import BaseSettings

import gateway.platform.settings
import worker.settings
from gateway.cli.launch import launch_plan
from gateway.cli.main import main
from gateway.process.supervision import processes
from tests.deploy import compose_file
from tests.deploy.compose_file import (
    ENVIRONMENT,
    FILE,
    FILLED_IN,
    OURS,
    OVERRIDE,
    MissingVariableError,
    Service,
    interpolated,
    load,
    services,
    variables_of,
)
from tests.support.cases import all_cases
from tests.support.stack import CHECKPOINT, REPOSITORY
from worker.hosting.settings import HostSettings, read_models

SERVICES = list(services().values())
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
EXACT = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+(\.\d+)?(-[a-z0-9.]+)?")
"""An image with the tag of one release: PostgreSQL's have two numbers, others' have three."""
CLUSTER = {"redis-cluster", *map("redis-{}".format, range(1, 7))}
"""The servers of a Redis Cluster, and the command that connects them."""
DOCUMENTED = re.compile(r"^#?([A-Z_]+)=", re.MULTILINE)


def by_name(service: Service) -> str:
    return service.name


every_service = all_cases("service", SERVICES, ids=by_name)
every_own_service = all_cases("service", [services()[name] for name in OURS], ids=by_name)


@pytest.mark.parametrize("path", [FILE, OVERRIDE], ids=lambda path: path.name)
def test_file_follows_the_specification(path: Path, tmp_path: Path) -> None:
    # After loading: the schema has no YAML tags.
    plain = tmp_path / "compose.yaml"
    plain.write_text(yaml.safe_dump(load(path)))
    assert compose_file.schema_errors(plain) == ""


@pytest.mark.slow
def test_schema_refuses_misspelt_fields(tmp_path: Path) -> None:
    wrong = load(FILE)
    wrong["services"]["gateway"]["healthcheck"]["intervall"] = "1s"
    plain = tmp_path / "compose.yaml"
    plain.write_text(yaml.safe_dump(wrong))
    assert "intervall" in compose_file.schema_errors(plain)


def test_docker_compose_accepts_the_files(tmp_path: Path) -> None:
    if shutil.which("docker") is None or not _has_compose():
        pytest.skip("Docker's Compose plugin is not installed")
    filled_in = tmp_path / "env"
    filled_in.write_text("".join(f"{name}={value}\n" for name, value in FILLED_IN.items()))
    command = ["docker", "compose", "--env-file", str(filled_in), "--file", str(FILE)]
    command += ["--file", str(OVERRIDE), "--profile", "*", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def _has_compose() -> bool:
    version = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return version.returncode == 0


# --- variables ---------------------------------------------------------------------------------


def test_example_has_exactly_the_variables() -> None:
    passed_on = {
        name
        for service in SERVICES
        for name, value in service.options.get("environment", {}).items()
        if value is None
    }
    asked_for = variables_of(FILE.read_text()).keys() | passed_on
    assert set(DOCUMENTED.findall(ENVIRONMENT.read_text())) == asked_for


def test_example_leaves_only_required_variables_empty() -> None:
    asked_for = variables_of(FILE.read_text())
    required = {name for name, kind in asked_for.items() if kind == ":?"}
    uncommented = set(re.findall(r"^([A-Z_]+)=$", ENVIRONMENT.read_text(), re.MULTILINE))
    assert uncommented == required == FILLED_IN.keys()
    header = (REPOSITORY / "docker-compose.yml").read_text().partition("docker compose up")[0]
    assert {*re.findall(r"\b[A-Z_]{9,}\b", header)} == required


@all_cases("name", FILLED_IN)
def test_nothing_starts_without_a_required_variable(name: str) -> None:
    with pytest.raises(MissingVariableError, match=name):
        interpolated(load(FILE), FILLED_IN | {name: ""})


def test_no_password_is_in_a_command_line() -> None:
    for service in load(FILE)["services"].values():
        words = " ".join([*service.get("command", []), *service.get("entrypoint", [])])
        assert not re.search(r"PASSWORD|SECRET|TOKEN", words)


def test_env_file_is_not_committed() -> None:
    ignored = (REPOSITORY / ".gitignore").read_text().splitlines()
    assert {"/.env", "/compose.override.yaml"} <= set(ignored)


# --- images, health, order ---------------------------------------------------------------------


@every_service
def test_image_is_pinned_to_one_release(service: Service) -> None:
    assert EXACT.fullmatch(service.options["image"])


@every_own_service
def test_sluice_images_have_this_version_and_are_built_here(service: Service) -> None:
    build = service.options["build"]
    assert service.options["image"].endswith(f":{VERSION}")
    assert (REPOSITORY / build["context"] / build["dockerfile"]).is_file()


@every_service
def test_service_has_a_health_check_or_ends(service: Service) -> None:
    check = service.options["healthcheck"]
    if service.is_one_shot:
        assert check == {"disable": True}
        return
    assert compose_file.seconds(check["timeout"]) <= compose_file.seconds(check["interval"])
    assert len(check["test"]) > 1


@every_service
def test_service_waits_for_its_dependencies(service: Service) -> None:
    for name, condition in service.options.get("depends_on", {}).items():
        wanted: dict[str, Any] = {
            "condition": (
                "service_completed_successfully"
                if services()[name].is_one_shot
                else "service_healthy"
            )
        }
        if "cluster" in services()[name].profiles and "cluster" not in service.profiles:
            wanted["required"] = False
        assert condition == wanted, name


def test_dependencies_of_services_have_no_cycle() -> None:
    def all_before(name: str, path: tuple[str, ...]) -> Iterator[str]:
        assert name not in path
        for each in services()[name].options.get("depends_on", {}):
            yield each
            yield from all_before(each, (*path, name))

    assert set(all_before("gateway", ())) == {"redis", "migrate", "postgres"} | CLUSTER
    for service in SERVICES:
        assert service.name not in set(all_before(service.name, ()))


def test_profiles_are_those_of_engines_and_of_the_demo_key() -> None:
    profiles = {each.name: each.profiles for each in SERVICES if each.profiles}
    assert profiles == {
        "worker-cpu": ["cpu"],
        "worker-gpu": ["gpu"],
        "worker-host": ["host"],
        "seed": ["seed"],
        **{name: ["cluster"] for name in CLUSTER},
    }


def test_only_the_gpu_worker_reserves_gpus() -> None:
    reserved = {
        service.name: service.options["deploy"]["resources"]["reservations"]["devices"]
        for service in SERVICES
        if "deploy" in service.options
    }
    assert reserved == {"worker-gpu": [{"driver": "nvidia", "count": "1", "capabilities": ["gpu"]}]}


# --- what containers may do --------------------------------------------------------------------


@every_service
def test_ports_are_open_on_loopback_only(service: Service) -> None:
    assert all(port.startswith("127.0.0.1:") for port in service.options.get("ports", []))


@every_service
def test_container_is_unprivileged(service: Service) -> None:
    assert service.options["cap_drop"] == ["ALL"]
    assert service.options["security_opt"] == ["no-new-privileges:true"]
    # vLLM compiles its kernels at run time and caches them.
    assert service.options.get("read_only", False) is not service.name.startswith("worker-")


@every_service
def test_container_has_a_memory_limit(service: Service) -> None:
    assert re.fullmatch(r"\d+[mg]", service.options["mem_limit"])


def test_networks_connect_only_services_that_need_each_other() -> None:
    networks = load(FILE)["networks"]
    members: dict[str, set[str]] = {name: set() for name in networks}
    for service in SERVICES:
        for name in service.options["networks"]:
            members[name].add(service.name)
    workers = {"worker", "worker-cpu", "worker-gpu", "worker-host"}
    processes = {"gateway", "celery", "beat", *workers}
    assert members == {
        "customers": {"gateway"},
        "operators": {"prometheus", "grafana"},
        "webhooks": {"celery"},
        "models": workers - {"worker"},
        "redis": {"redis", "seed", *CLUSTER, *processes},
        "database": {"postgres", "migrate", "seed", "gateway", "celery"},
        "telemetry": {"prometheus", "tempo", "otel-collector", "grafana", *processes},
    }
    internal = {name for name, options in networks.items() if (options or {}).get("internal")}
    assert internal == {"redis", "database", "telemetry"}
    # A port of a container that is only in internal networks is not published.
    for service in SERVICES:
        if "ports" in service.options:
            assert not internal.issuperset(service.options["networks"]), service.name


@every_service
def test_init_reaps_processes(service: Service) -> None:
    # Tempo and Grafana start directly: no other program may be process 1 without support for it.
    assert service.options["init"] is True


@every_service
def test_mounts_exist(service: Service) -> None:
    named = load(FILE)["volumes"].keys()
    for source, target in service.mounts:
        assert source in named or (REPOSITORY / source).exists(), source
        assert target.startswith("/")


def test_every_named_volume_is_used() -> None:
    used = {source for service in SERVICES for source, _ in service.mounts}
    assert load(FILE)["volumes"].keys() <= used


@every_service
def test_watched_paths_exist(service: Service) -> None:
    for watch in service.options.get("develop", {}).get("watch", []):
        assert (REPOSITORY / watch["path"]).exists(), watch


# --- environment --------------------------------------------------------------------------------


USERS = {
    **dict.fromkeys(("gateway", "seed"), "gateway:g4teway"),
    **dict.fromkeys(("celery", "beat"), "jobs:j0bs"),
    **dict.fromkeys(("worker", "worker-cpu", "worker-gpu", "worker-host"), "worker:w0rker"),
}
"""The Redis users of services."""


def settings_of(service: Service) -> type[BaseSettings]:
    if service.name == "worker-host":
        return HostSettings
    is_worker = service.name.startswith("worker")
    return worker.settings.WorkerSettings if is_worker else gateway.platform.settings.Settings


def variables(settings: type[BaseSettings]) -> set[str]:
    prefix = settings.model_config["env_prefix"]
    return {f"{prefix}{name.upper()}" for name in settings.model_fields}


@every_own_service
def test_environment_has_only_settings_of_the_process(service: Service) -> None:
    known = variables(settings_of(service))
    if service.name == "worker-host":  # Its workers inherit the environment.
        known |= variables(worker.settings.WorkerSettings)
    known |= {name for name in vars(environment_variables) if name.startswith("OTEL_")}
    if service.name.startswith("worker-"):
        known.add("HF_TOKEN")  # Hugging Face's own.
    if service.name in ("gateway", "celery") or service.name.startswith("worker-"):
        known |= {f"AWS_{name}" for name in ("ENDPOINT_URL", "REGION", "ACCESS_KEY_ID")}
        known.add("AWS_SECRET_ACCESS_KEY")
    assert service.options.get("environment", {}).keys() <= known


@every_own_service
def test_environment_makes_valid_settings(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        _set_environment(patch, service)
        settings: Any = settings_of(service)()
        if service.name == "worker-host":
            (source,) = [each for each, to in service.mounts if to == str(settings.models)]
            models = tmp_path / "models.json"
            models.write_text(_on_this_machine((REPOSITORY / source).read_text()))
            assert len(read_models(models)) == 2
    redis_url = settings.redis_url
    if service.name != "migrate":
        text = redis_url if isinstance(redis_url, str) else redis_url.get_secret_value()
        assert text == f"redis://{USERS[service.name]}@redis:6379/0"
    if service.name in ("gateway", "celery", "migrate", "seed"):
        url = "postgresql+asyncpg://sluice:p0stgres@postgres:5432/sluice"
        assert settings.database_url.get_secret_value() == url


def _set_environment(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    for name in list(os.environ):
        if name.startswith("SLUICE_"):
            monkeypatch.delenv(name)
    for name, value in service.environment.items():
        monkeypatch.setenv(name, _on_this_machine(value))


def _on_this_machine(text: str) -> str:
    # The path of the model is in the image.
    return text.replace("/app/demo-model", str(CHECKPOINT))


@every_own_service
def test_stop_grace_period_covers_the_drain(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    if service.is_one_shot:
        return
    with monkeypatch.context() as patch:
        _set_environment(patch, service)
        settings: Any = settings_of(service)()
    if service.name == "gateway":
        needed = (settings.drain_delay + settings.drain_timeout).total_seconds()
        needed += processes.DRAIN_MARGIN_SECONDS
    elif service.name == "celery":
        needed = launch_plan.JOBS_STOP_SECONDS
    elif service.name == "beat":
        needed = launch_plan.BEAT_STOP_SECONDS
    else:
        # As in `sluice up`, for the default setting.
        drain_seconds = float(service.environment["SLUICE_DRAIN_SECONDS"])
        needed = launch_plan.WORKER_STOP_SECONDS - 30.0 + drain_seconds
    assert needed <= service.stop_seconds <= needed + 10


@every_own_service
def test_command_exists(service: Service) -> None:
    if service.name == "seed":
        return
    command: click.Command | None = main
    words = service.options.get("command", ["worker"])
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    assert not isinstance(command, click.Group)


def test_override_changes_only_existing_services_and_settings() -> None:
    for name, options in load(OVERRIDE)["services"].items():
        service = services()[name]
        if name in OURS:
            assert options.get("environment", {}).keys() <= variables(settings_of(service))
        for source, target in Service(name, options).mounts:
            assert (REPOSITORY / source).is_dir()
            assert target == f"/opt/sluice/lib/python3.11/site-packages/{Path(source).name}"
        for port in options.get("ports", []):
            assert port.startswith("127.0.0.1:")
