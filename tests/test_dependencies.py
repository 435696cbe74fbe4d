"""Dependencies: exact versions with hashes, and few of them."""

import importlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from tests.support.patience import PROCESS_PATIENCE_SECONDS
from tests.support.processes import free_port
from tests.support.stack import REPOSITORY

MOST_DIRECT = 36
"""Direct dependencies of the gateway."""

HAS_NO_HASH = "torch-cpu.txt"
"""Its only package is a different file on each index."""

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
GATEWAY = PROJECT["optional-dependencies"]["gateway"]

_PINNED = re.compile(r"[a-z0-9.-]+={2,3}[^*,\s]+")
_MARKER = r"( ; python_full_version (<|>=) '3\.[0-9.]+')?"
_HASHED = re.compile(rf"{_PINNED.pattern}{_MARKER}( \\\n    --hash=sha256:[0-9a-f]{{64}})+")


# Programs, files of alembic, and importers of vLLM, which take ten seconds.
LEFT_OUT = {
    "migrations",
    "__main__.py",
    "plugin.py",
    "chain_processor.py",
    "chain_v1.py",
}


def test_every_dependency_is_pinned_to_one_version_and_its_hashes() -> None:
    files = sorted((REPOSITORY / "requirements").glob("*.txt"))
    assert len(files) >= 5
    for file in files:
        text = "".join(
            line for line in file.read_text().splitlines(keepends=True) if line[0] != "#"
        )
        pinned = _PINNED if file.name == HAS_NO_HASH else _HASHED
        assert text
        assert pinned.sub("", text).strip() == "", file.name


def test_gateway_has_few_dependencies() -> None:
    assert 10 < len({*PROJECT["dependencies"], *GATEWAY}) <= MOST_DIRECT


def test_every_module_can_be_imported() -> None:
    files = [
        file.relative_to(REPOSITORY)
        for package in ("common", "contract", "gateway", "worker")
        for file in sorted((REPOSITORY / package).rglob("*.py"))
    ]
    modules = [
        ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        for file in files
        if not LEFT_OUT & set(file.parts)
    ]
    assert len(modules) > 300
    for module in modules:
        importlib.import_module(module)


def test_set_up_without_a_network_says_so_in_one_line(tmp_path: Path) -> None:
    for name in ("scripts", "requirements"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    settings = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"http://127.0.0.1:{free_port()}/simple",
        "PIP_RETRIES": "1",
        "SLUICE_DEVICE": "cpu",
    }
    done = subprocess.run(
        ["scripts/setup.sh", "gateway", "local", "worker"],
        cwd=tmp_path,
        env=own | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_PATIENCE_SECONDS,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("setup: pip cannot connect to its index. Check the network")
    assert "There is no" not in done.stdout
