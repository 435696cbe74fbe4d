"""Report the progress of a run, the remaining time, and at its end the time of each part."""

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
LEAST_SHARE: Final = 0.2
"""Share of the tests after which times predict the rest: engines start first."""


class Progress:
    """Prints a line every ten seconds instead of a dot for each test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cache: pytest.Cache | None = getattr(config, "cache", None)
        self._processes: int = config.option.numprocesses or 1
        self._began = self._reported = time.monotonic()
        self._total = 0
        self._seconds = defaultdict[str, float](float)
        """By test: set-up, call and tear-down."""
        self._outcomes = Counter[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for a passed test, nor for a failed one, which has its own line."""
        if hasattr(report, "wasxfail"):
            return None
        if report.outcome == "failed":
            return ("failed" if report.when == "call" else "error"), "", "FAILED"
        if report.when == "call" and report.outcome == "passed":
            return "passed", "", "PASSED"
        return None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Store the number of tests; each process has collected the same."""
        self._expect(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Store the number of tests if one process runs them all."""
        self._expect([item.nodeid for item in session.items])

    def _expect(self, ids: Sequence[str]) -> None:
        if ids and not self._total:
            self._total = len(ids)
            files = Counter(map(_file, ids))
            last: Mapping[str, float] = self._cache.get(CACHE_KEY, {}) if self._cache else {}
            known = {file: last[file] / number for file, number in files.items() if file in last}
            self._has_times = bool(known)
            usual = sum(known.values()) / len(known) if known else 1.0
            self._weights = {file: known.get(file, usual) for file in files}
            self._work = sum(self._weights[file] * number for file, number in files.items())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, and print a line if it is due. Report a failed test at once."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown" or report.outcome == "failed":
            self._outcomes[str(report.when)] += 1
        if report.outcome == "failed":
            self._print(f"FAILED {report.nodeid} ({report.when})")
        if time.monotonic() - self._reported >= EVERY_SECONDS:
            self._reported = time.monotonic()
            self._print(self._line())

    def pytest_terminal_summary(self) -> None:
        """Print the time of each folder and the slowest tests, if all or many of them ran."""
        if self._config.option.collectonly or self._total < 1_000:
            return
        if self._cache:
            self._cache.set(CACHE_KEY, _summed(self._seconds, _file))
        self._print_longest("Time of each folder", _summed(self._seconds, _folder), most=100)
        self._print_longest(
            "Longest groups of tests in one process", _summed(self._seconds, group_of)
        )
        self._print_longest("The slowest tests", self._seconds, most=SLOWEST)

    def _print_longest(self, title: str, seconds: Mapping[str, float], *, most: int = 8) -> None:
        self._print(f"\n{title}:")
        for name, its in sorted(seconds.items(), key=lambda item: -item[1])[:most]:
            self._print(f"{its:8.1f} s  {name}")

    def _line(self) -> str:
        done = self._outcomes["teardown"]
        elapsed = time.monotonic() - self._began
        failed = self._outcomes["call"] + self._outcomes["setup"]
        seconds = self._seconds_left(elapsed)
        left = "" if seconds is None else f"about {_minutes(seconds)} left, "
        return (
            f"tests: {done:,} of {self._total:,} after {_minutes(elapsed)}, {left}{failed} failed"
        )

    def _seconds_left(self, elapsed: float) -> float | None:
        """Return the estimated time of the rest, from the last run's times or this one's."""
        done = sum(self._weights.get(_file(test), 0.0) for test in self._seconds)
        if self._has_times:
            return max(self._work - done, 0.0) / self._processes
        share = done / self._work
        return elapsed * (1 - share) / share if share > LEAST_SHARE else None

    def _print(self, line: str) -> None:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(line)


def _file(test: str) -> str:
    return test.partition("::")[0]


def _folder(test: str) -> str:
    return "/".join(_file(test).split("/")[:-1][:3])


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"


def _summed(seconds: Mapping[str, float], group: Callable[[str], str]) -> dict[str, float]:
    sums = defaultdict[str, float](float)
    for test, its in seconds.items():
        sums[group(test)] += its
    return dict(sums)
