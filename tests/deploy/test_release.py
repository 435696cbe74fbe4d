"""The files of a release: versions that agree, complete SBOMs, and provenance of every file."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from scripts import release
from tests.deploy.test_images import packages
from tests.support.cases import all_cases
from tests.support.stack import REPOSITORY

NOON = datetime(2026, 11, 27, 12, tzinfo=UTC)


def test_every_file_names_the_version_of_the_package() -> None:
    version = release.project()["version"]
    assert release.versions() == {name: {version} for name in release.VERSIONED}


@all_cases("name", ["sluice", "sluice-gateway"])
def test_sbom_has_every_locked_package_with_the_hashes_of_its_files(name: str) -> None:
    wheel = REPOSITORY / "LICENSE"
    document = json.loads(release.sbom(name, wheel, NOON))
    assert document["specVersion"] == "1.6"
    root = document["metadata"]["component"]
    found = {each["purl"]: each for each in document["components"]}
    locked = packages("gateway") | (packages("local") if name == "sluice" else {})
    # The images have Python 3.11.14.
    del locked["async-timeout"]
    purls = {f"pkg:pypi/{package}@{version}" for package, version in locked.items()}
    ours = f"pkg:pypi/sluice@{root['version']}"
    extra = set() if name == "sluice" else {ours, "pkg:docker/python@3.11.14-slim-bookworm"}
    assert found.keys() == purls | extra
    for purl in purls:
        [source] = found[purl]["externalReferences"]
        assert source["hashes"], purl
    [wheel_hash] = (root if name == "sluice" else found[ours])["hashes"]
    assert wheel_hash["content"] == release.digest(wheel)
    [graph] = [each for each in document["dependencies"] if each["ref"] == root["bom-ref"]]
    assert len(graph["dependsOn"]) == len(found)
    # Whoever builds a commit gets the same document.
    assert json.loads(release.sbom(name, wheel, NOON)) == document
    del document["components"][1:], document["dependencies"]
    release.check_sbom(json.dumps(document))
    document["components"][0]["hashes"] = [{"alg": "SHA-1"}]
    with pytest.raises(SystemExit, match="invalid"):
        release.check_sbom(json.dumps(document))


def test_provenance_names_each_file_the_commit_and_the_lock_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.whl", tmp_path / "b.json"]
    for file in files:
        file.write_text(file.name)
    statement = release.provenance(files, began=NOON, builder="https://builder.example")
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert [(each["name"], each["digest"]["sha256"]) for each in statement["subject"]] == [
        (file.name, release.digest(file)) for file in files
    ]
    commit, *locks = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert commit["digest"] == {"gitCommit": release.git("rev-parse", "HEAD")}
    gateway = release.digest(REPOSITORY / "requirements" / "gateway.txt")
    assert gateway in {each["digest"]["sha256"] for each in locks}
