"""The configuration of Prometheus, Grafana, Tempo and the collector fits the services."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose_file import services
from tests.support.processes import free_port, spawn, stop, wait_until
from tests.support.stack import REPOSITORY, http_status

OPS = REPOSITORY / "ops"
PROMETHEUS = OPS / "prometheus" / "prometheus.yml"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def file_of(service: str, target: str) -> Path:
    """Return the repository's file that is mounted at a path of a service."""
    for source, mounted in services()[service].mounts:
        if target == mounted or target.startswith(f"{mounted}/"):
            return REPOSITORY / source / target[len(mounted) :].lstrip("/")
    raise LookupError(target)


# --- Prometheus --------------------------------------------------------------------------------


def need(program: str) -> str:
    if (path := shutil.which(program)) is None:
        pytest.skip(f"{program} (of Debian's prometheus package) is not installed")
    return path


def test_promtool_accepts_the_configuration() -> None:
    command = [need("promtool"), "check", "config", str(PROMETHEUS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """A server with the service's own arguments; its URL."""
    port = free_port()
    replaced = {"/etc/prometheus/": f"{OPS / 'prometheus'}/", "=/prometheus": f"={tmp_path}"}
    arguments = services()["prometheus"].options["command"]
    for path, other in replaced.items():
        arguments = [word.replace(path, other) for word in arguments]
    process = spawn(
        need("prometheus"),
        *arguments,
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield f"http://127.0.0.1:{port}"
    assert stop(process) == 0


def test_prometheus_starts_with_the_arguments_of_the_service(prometheus: str) -> None:
    *program, url = services()["prometheus"].check
    mine = url.replace("http://127.0.0.1:9090", prometheus)
    wait_until(lambda: http_status(mine) == 200, what="Prometheus being ready")
    if shutil.which(program[0]) is not None:
        assert subprocess.run([*program, mine], check=False, timeout=60).returncode == 0
        wrong = mine.replace("/-/ready", "/nowhere")
        assert subprocess.run([*program, wrong], check=False, timeout=60).returncode != 0


def test_every_process_is_scraped_where_it_listens() -> None:
    ports = {"gateway": {9463}, "celery": {9464}, "beat": {9464}, "worker-host": {9465, 9466}}
    ports |= {name: {9465} for name in ("worker", "worker-cpu", "worker-gpu")}
    scraped: dict[str, set[int]] = {}
    jobs = set()
    for job in read(PROMETHEUS)["scrape_configs"]:
        for found in job.get("dns_sd_configs", []):
            jobs.add(job["job_name"])
            for name in found["names"]:
                scraped.setdefault(name, set()).add(found["port"])
    # An operator adds the service that reports GPUs.
    assert scraped == ports | {"dcgm-exporter": {9400}}
    settings = {"SLUICE_OPERATOR_PORT", "SLUICE_METRICS_PORT", "SLUICE_HEALTH_PORT"}
    settings.add("SLUICE_HOST_HEALTH_PORT")
    for name, own in ports.items():
        environment = services()[name].environment
        assert {int(environment[key]) for key in settings & environment.keys()} == own
    assert jobs == {
        "sluice-gateway",
        "sluice-worker",
        "hosted-worker",
        "sluice-jobs",
        "sluice-beat",
        "dcgm-exporter",
    }


def test_other_targets_are_services() -> None:
    for job in read(PROMETHEUS)["scrape_configs"]:
        for found in job.get("static_configs", []):
            for target in found["targets"]:
                assert target.partition(":")[0] in {*services(), "127.0.0.1"}


def test_prometheus_reads_the_folder_of_the_rules() -> None:
    (pattern,) = read(PROMETHEUS)["rule_files"]
    folder = file_of("prometheus", str(Path(pattern).parent))
    assert folder == OPS / "prometheus" / "rules"


# --- Grafana -----------------------------------------------------------------------------------


def test_data_sources_lead_to_services_and_to_each_other() -> None:
    environment = services()["grafana"].environment
    provisioning = file_of("grafana", environment["GF_PATHS_PROVISIONING"])
    sources = read(provisioning / "datasources" / "datasources.yaml")["datasources"]
    assert {source["uid"]: source["url"] for source in sources} == {
        "prometheus": "http://prometheus:9090",
        "tempo": f"http://tempo:{read(OPS / 'tempo.yaml')['server']['http_listen_port']}",
    }
    prometheus, tempo = (source["jsonData"] for source in sources)
    assert prometheus["timeInterval"] == read(PROMETHEUS)["global"]["scrape_interval"]
    assert prometheus["exemplarTraceIdDestinations"] == [
        {"name": "trace_id", "datasourceUid": "tempo"}
    ]
    assert tempo["tracesToMetrics"]["datasourceUid"] == "prometheus"


def test_dashboards_are_read_from_their_folder() -> None:
    (provider,) = read(OPS / "grafana/provisioning/dashboards/dashboards.yaml")["providers"]
    folder = file_of("grafana", provider["options"]["path"])
    assert folder == OPS / "grafana" / "dashboards"


# --- traces ------------------------------------------------------------------------------------


def test_processes_export_spans_through_the_collector_to_tempo() -> None:
    collector = read(file_of("otel-collector", "/etc/otelcol/config.yaml"))
    protocols = collector["receivers"]["otlp"]["protocols"]
    port = protocols["http"]["endpoint"].rpartition(":")[2]
    for name in ("gateway", "celery", "beat", "worker", "worker-cpu", "worker-gpu"):
        environment = services()[name].environment
        assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://otel-collector:{port}"
        assert environment["SLUICE_TRACES"] == "true"
    tempo = read(file_of("tempo", "/etc/tempo.yaml"))
    receiver = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert collector["exporters"]["otlp/tempo"]["endpoint"] == receiver.replace("0.0.0.0", "tempo")


def test_pipelines_of_the_collector_use_what_is_defined() -> None:
    collector = read(OPS / "otel" / "collector.yaml")
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= collector[kind].keys()
        assert pipeline["processors"][0] == "memory_limiter"
    assert set(collector["service"]["extensions"]) == collector["extensions"].keys()


def test_health_checks_use_the_ports_of_the_servers() -> None:
    collector = read(OPS / "otel" / "collector.yaml")
    asked = collector["extensions"]["health_check"]["endpoint"].rpartition(":")[2]
    assert services()["otel-collector"].check[-1] == f"http://127.0.0.1:{asked}/"
    port = read(OPS / "tempo.yaml")["server"]["http_listen_port"]
    assert services()["tempo"].check[-1] == f"http://127.0.0.1:{port}/ready"
    reader = collector["service"]["telemetry"]["metrics"]["readers"][0]["pull"]["exporter"]
    scraped = {
        target
        for job in read(PROMETHEUS)["scrape_configs"]
        for found in job.get("static_configs", [])
        for target in found["targets"]
    }
    assert {f"otel-collector:{reader['prometheus']['port']}", f"tempo:{port}"} <= scraped


def test_tempo_keeps_its_traces_in_its_volume() -> None:
    storage = read(OPS / "tempo.yaml")["storage"]["trace"]
    folder = {target: source for source, target in services()["tempo"].mounts}
    assert folder["/var/tempo"] == "tempo-data"
    assert all(
        path.startswith("/var/tempo/")
        for path in (storage["wal"]["path"], storage["local"]["path"])
    )
