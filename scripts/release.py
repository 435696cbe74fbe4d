"""Make a release: its version and changelog, or its files.

    .venv/bin/python scripts/release.py prepare 0.4.0   set the version, collect the changelog
    make release                                        write dist/: wheel, SBOMs, provenance

`make release` builds the commit that is checked out, and needs no network. Its files:

- the wheel, the same byte for byte whoever builds it with the locked tools;
- an SBOM (CycloneDX) for the wheel and for each image. The packages of an image are those of its
  lock file, with the hashes that pip checks when the image is built;
- provenance (SLSA, as an in-toto statement): the hash of each file, the commit and the lock files.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    XsUri,
)
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.markers import Marker

ROOT: Final = Path(__file__).resolve().parent.parent
FRAGMENTS: Final = ROOT / "docs" / "changelog.d"
SOURCE: Final = "https://github.com/sluice/sluice"
PYTHON: Final = {"python_version": "3.11", "python_full_version": "3.11.14"}
"""The images' Python, for which locked packages with a marker are chosen."""
LOCKS: Final = {
    "sluice": ("gateway", "local"),
    "sluice-gateway": ("gateway",),
    "sluice-worker-cpu": ("torch-cpu", "worker-cpu"),
    "sluice-worker-gpu": ("worker-gpu",),
}
"""The lock files of the wheel, which is the first, and of each image."""
VERSIONED: Final = {
    "pyproject.toml": r'(?<=^name = "sluice"\nversion = ")([^"]+)',
    "deploy/helm/sluice/Chart.yaml": r"^(?:appVersion|version): (.+)$",
    "docker-compose.yml": r"^ +image: sluice-(?:gateway|worker-cpu|worker-gpu):(.+)$",
    "deploy/docker/Dockerfile.gateway": r"--tag sluice-gateway:(\S+)",
    "deploy/docker/Dockerfile.worker": r"--tag sluice-worker-gpu:(\S+)",
}
"""The files that name the version, and where."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make a release.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare").add_argument("version", help="such as 0.4.0")
    building = commands.add_parser("build")
    building.add_argument("--out", type=Path, default=ROOT / "dist")
    building.add_argument("--draft", action="store_true", help="whatever is not ready")
    building.add_argument("--builder", default=f"{SOURCE}/blob/main/scripts/release.py")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.version)
    else:
        if not options.draft and (faults := list(unready())):
            sys.exit("\n".join(["release: This commit is not ready:", *faults]))
        build(options.out, builder=options.builder)


def prepare(version: str) -> None:
    """Set the version and move the fragments into its section of the changelog.

    A section that exists already gets the further fragments, and the date of today.
    """
    for name, pattern in VERSIONED.items():
        path = ROOT / name
        path.write_text(
            re.sub(
                pattern,
                lambda found: found[0].replace(found[1], version),
                path.read_text(),
                flags=re.MULTILINE,
            )
        )
    changelog, earlier = ROOT / "CHANGELOG.md", FRAGMENTS / "0_earlier.md"
    section = rf"(<a [^>]*></a>\n)?## {re.escape(version)} \(.*\n((.*\n)*?)(?=(<a .*\n)?## |\Z)"
    if found := re.search(section, changelog.read_text()):
        earlier.write_text(found[2].strip() + "\n")
        changelog.write_text(changelog.read_text().replace(found[0], ""))
    subprocess.run([sys.executable, "-m", "scriv", "collect"], check=True, cwd=ROOT)


def unready() -> Iterator[str]:
    """Yield what a release still needs."""
    version = project()["version"]
    for name, found in versions().items():
        if found != {version}:
            yield f"{name} has version {', '.join(sorted(found))} instead of {version}."
    if f"\n## {version} (" not in (ROOT / "CHANGELOG.md").read_text():
        yield f"CHANGELOG.md has no section {version}."
    if left := list(FRAGMENTS.glob("2*.md")):
        yield f"docs/changelog.d still has {len(left)} fragments."
    if git("status", "--porcelain"):
        yield "The working tree has changes that are not committed."


def project() -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def versions() -> dict[str, set[str]]:
    """Return the versions that each file names."""
    return {
        name: set(re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE))
        for name, pattern in VERSIONED.items()
    }


def build(out: Path, *, builder: str) -> None:
    """Write the files of the commit that is checked out."""
    began = datetime.now(UTC)
    out.mkdir(parents=True, exist_ok=True)
    for file in out.iterdir():
        file.unlink()
    seconds = git("show", "--no-patch", "--format=%ct")
    wheel = build_wheel(out, os.environ | {"SOURCE_DATE_EPOCH": seconds})
    version = project()["version"]
    for name in LOCKS:
        file = out / f"{name}-{version}.cdx.json"
        text = sbom(name, wheel, datetime.fromtimestamp(int(seconds), UTC))
        check_sbom(text)
        file.write_text(text + "\n")
    statement = provenance(sorted(out.iterdir()), began=began, builder=builder)
    (out / f"sluice-{version}.intoto.json").write_text(json.dumps(statement, indent=1) + "\n")
    for file in sorted(out.iterdir()):
        print(f"{digest(file)}  {file.name}")


def build_wheel(out: Path, environment: Mapping[str, str]) -> Path:
    """Build the wheel from the commit's files alone."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files.tar")
        git("archive", "--output", str(files), "HEAD")
        with tarfile.open(files) as archive:
            archive.extractall(folder, filter="data")
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
        command += ["--directory", str(out.resolve())]
        subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    [wheel] = out.glob("*.whl")
    return wheel


def sbom(name: str, wheel: Path, made_at: datetime) -> str:
    """Return the SBOM of the wheel or an image, in JSON."""
    version = project()["version"]
    ours = _component("sluice", version)
    ours.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=digest(wheel)))
    parts = [
        _component(package, locked, files=hashes)
        for lock in LOCKS[name]
        for package, locked, hashes in packages(lock)
    ]
    if name == "sluice":
        root = ours
    else:
        root = _component(name, version, kind="docker")
        text = (ROOT / f"deploy/docker/Dockerfile.{name.split('-')[1]}").read_text()
        bases = dict.fromkeys(re.findall(r"^FROM (\S+):(\S+)", text, re.MULTILINE))
        parts += [ours, *(_component(image, tag, kind="docker") for image, tag in bases)]
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"{SOURCE}/{name}/{digest(wheel)}"))
    bom.metadata.timestamp, bom.metadata.component = made_at, root
    bom.components.update(parts)
    # A lock file is complete, but does not say which package requires which.
    bom.register_dependency(root, parts)
    return JsonV1Dot6(bom).output_as_string(indent=1)


def check_sbom(text: str) -> None:
    """Raise SystemExit if a document violates CycloneDX' schema. Takes seconds."""
    if (fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise SystemExit(f"release: An SBOM is invalid: {fault}")


def _component(
    name: str, version: str, *, kind: str = "pypi", files: list[str] | None = None
) -> Component:
    url = XsUri(f"https://pypi.org/project/{name}/{version}/#files")
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=each) for each in files or ()]
    found = ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=url, hashes=hashes)
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY if kind == "pypi" else ComponentType.CONTAINER,
        bom_ref=f"{name}@{version}",
        purl=PackageURL(type=kind, name=name, version=version),
        external_references=[] if files is None else [found],
    )


def packages(lock: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the packages that the images' Python needs: name, version and hashes of their files."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    for block in re.split(r"\n(?=\S)", text.rstrip()):
        found = re.match(r"([\w.-]+)={2,3}(\S+)(?: ; ([^\n\\]+))?", block)
        if found and (found[3] is None or Marker(found[3]).evaluate(PYTHON)):
            yield found[1], found[2], re.findall(r"--hash=sha256:([0-9a-f]{64})", block)


def provenance(files: list[Path], *, began: datetime, builder: str) -> dict[str, Any]:
    """Return how files were made: an in-toto statement with SLSA's predicate."""
    commit = git("rev-parse", "HEAD")
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": file.name, "digest": {"sha256": digest(file)}} for file in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{SOURCE}/blob/main/CONTRIBUTING.md#changelog-and-releases",
                "externalParameters": {
                    "version": project()["version"],
                    "command": "make release",
                    "source": {"uri": f"git+{SOURCE}", "digest": {"gitCommit": commit}},
                },
                "resolvedDependencies": [
                    {"uri": f"git+{SOURCE}", "digest": {"gitCommit": commit}},
                    *(
                        {
                            "uri": f"git+{SOURCE}#{lock.relative_to(ROOT)}",
                            "digest": {"sha256": digest(lock)},
                        }
                        for lock in locks
                    ),
                ],
            },
            "runDetails": {
                "builder": {"id": builder},
                "metadata": {
                    "startedOn": f"{began:%Y-%m-%dT%H:%M:%SZ}",
                    "finishedOn": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
                },
            },
        },
    }


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def git(*arguments: str) -> str:
    """Return what a command of git prints."""
    command = ["git", *arguments]
    return subprocess.run(
        command, check=True, cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
