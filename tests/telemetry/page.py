"""The metrics in docs/metrics.md, and those of running processes."""

import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.patience import PATIENCE_SECONDS
from tests.support.stack import REPOSITORY

PREFIX = "sluice_"
_ROW = re.compile(r"\| `(\w+)` \| (counter|gauge|histogram) \|([^|]*)\|")


class Documented(NamedTuple):
    """One row of the page."""

    section: str
    name: str
    type: str
    labels: frozenset[str]

    @property
    def family(self) -> str:
        """Its name without a counter's suffix."""
        return self.name.removesuffix("_total") if self.type == "counter" else self.name


def documented() -> list[Documented]:
    """Return every metric of the page's tables, and the one that its text names."""
    rows: list[Documented] = []
    section = ""
    for line in (REPOSITORY / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").partition(" (")[0]
        elif found := _ROW.match(line):
            name, kind, labels = found.groups()
            names = frozenset(label for each in labels.split(",") if (label := each.strip()))
            rows.append(Documented(section, name, kind, names))
    build = Documented(
        "Every process", "sluice_build_info", "gauge", frozenset({"version", "component"})
    )
    return [*rows, build]


@dataclass(frozen=True, slots=True)
class Scrape:
    """All metrics of a process at one time."""

    families: Mapping[str, Metric]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have a name and some labels; 0 if there are none."""
        return sum(sample.value for sample in self.samples(name, **labels))

    def samples(self, name: str, **labels: str) -> list[Sample]:
        """Return the samples that have a name and some labels."""
        return [
            sample
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def ours(self) -> list[Metric]:
        """Return Sluice's families."""
        return [each for name, each in self.families.items() if name.startswith(PREFIX)]


def fetch(url: str, accept: str = "text/plain") -> tuple[str, str]:
    """Return the content type and the text of `url`/metrics."""
    request = urllib.request.Request(f"{url}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        return response.headers["content-type"], response.read().decode()


def scrape(url: str) -> Scrape:
    """Return the metrics of a process now."""
    _, text = fetch(url)
    return Scrape({family.name: family for family in text_string_to_metric_families(text)})
