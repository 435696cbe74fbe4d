"""Report how far a run of the tests is, how much is left, and at its end where the time went."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pytest

from tests.support.scheduling import group_of

EVERY_SECONDS: Final = 10.0
SLOWEST: Final = 20
CACHE_KEY: Final = "sluice/seconds"
"""Where pytest's cache keeps the time that each file took in the last run."""


class Progress:
    """Prints a line every ten seconds in place of a dot for each test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cache: pytest.Cache | None = getattr(config, "cache", None)
        self._began = self._reported = time.monotonic()
        self._total = 0
        self._seconds = defaultdict[str, float](float)
        """By test: set-up, call and tear-down."""
        self._outcomes = Counter[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print nothing for what passes."""
        if report.when == "call" and report.outcome == "passed" and not hasattr(report, "wasxfail"):
            return "passed", "", "PASSED"
        return None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Note how many tests there are; each process has collected the same."""
        self._expect(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note how many tests there are where one process runs them all."""
        self._expect([item.nodeid for item in session.items])

    def _expect(self, ids: Sequence[str]) -> None:
        if ids and not self._total:
            self._total = len(ids)
            self._files = Counter(map(_file, ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, and print a line if it is time."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown" or report.outcome == "failed":
            self._outcomes[str(report.when)] += 1
        if time.monotonic() - self._reported >= EVERY_SECONDS:
            self._reported = time.monotonic()
            self._print(self._line())

    def pytest_terminal_summary(self) -> None:
        """Print the time of each folder and the slowest tests, where all or many of them ran."""
        if self._config.option.collectonly or self._total < 1_000:
            return
        if self._cache:
            self._cache.set(CACHE_KEY, _summed(self._seconds, _file))
        self._print_longest("Time of each folder", _summed(self._seconds, _folder), most=100)
        self._print_longest("What takes longest in one process", _summed(self._seconds, group_of))
        self._print_longest("The slowest tests", self._seconds, most=SLOWEST)

    def _print_longest(self, title: str, seconds: Mapping[str, float], *, most: int = 8) -> None:
        self._print(f"\n{title}:")
        for name, its in sorted(seconds.items(), key=lambda item: -item[1])[:most]:
            self._print(f"{its:8.1f} s  {name}")

    def _line(self) -> str:
        done = self._outcomes["teardown"]
        elapsed = time.monotonic() - self._began
        failed = self._outcomes["call"] + self._outcomes["setup"]
        share = self._share_done()
        # Engines and deployments start first, so what the first tests take says little.
        left = f"about {_minutes(elapsed * (1 - share) / share)} left, " if share > 0.05 else ""
        return (
            f"tests: {done:,} of {self._total:,} after {_minutes(elapsed)}, {left}{failed} failed"
        )

    def _share_done(self) -> float:
        """Return how much of the work is done, weighed by the times of the last run."""
        last: Mapping[str, float] = self._cache.get(CACHE_KEY, {}) if self._cache else {}
        known = sum(count for file, count in self._files.items() if file in last)
        mean = sum(last.get(file, 0.0) for file in self._files) / known if known else 1.0
        weights = {file: last.get(file, mean * n) / n for file, n in self._files.items()}
        done = sum(weights.get(_file(test), 0.0) for test in self._seconds)
        everything = sum(weights[file] * n for file, n in self._files.items())
        return done / everything

    def _print(self, line: str) -> None:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(line)


def _file(test: str) -> str:
    return test.partition("::")[0]


def _folder(test: str) -> str:
    return "/".join(_file(test).split("/")[:2])


def _minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def _summed(seconds: Mapping[str, float], group: Callable[[str], str]) -> dict[str, float]:
    sums = defaultdict[str, float](float)
    for test, its in seconds.items():
        sums[group(test)] += its
    return dict(sums)
