"""Leases of claimed jobs: extended while jobs run, ended with their counts, or released."""

import asyncio
from collections.abc import Iterable

from contract.queue import JobQueue, LeaseReport


class Leases:
    """The leases of one worker.

    A job that has ended or is returned stays leased until its last frame is written and the queue
    is updated, so that no other worker runs it in between.
    """

    def __init__(self, queue: JobQueue, worker: str, *, lease_ms: int) -> None:
        self._queue = queue
        self._worker = worker
        self._lease_ms = lease_ms
        self._ending: dict[str, LeaseReport] = {}
        self._to_end: dict[str, LeaseReport] = {}
        self._to_release: dict[str, LeaseReport] = {}
        self._has_work = asyncio.Event()
        self.settled = asyncio.Event()
        """Set while no lease waits to be ended or released."""
        self.settled.set()

    def hold_until_written(self, report: LeaseReport) -> None:
        """Keep the lease of a job that no longer runs until `end` or `release`."""
        self._ending[report.job_id] = report
        self.settled.clear()

    def end(self, reports: Iterable[LeaseReport]) -> None:
        """End leases permanently."""
        for report in reports:
            self._ending[report.job_id] = report
            self._to_end[report.job_id] = report
        self._wake()

    def release(self, reports: Iterable[LeaseReport]) -> None:
        """Expire leases now, so that other workers can claim the jobs."""
        for report in reports:
            self._ending[report.job_id] = report
            self._to_release[report.job_id] = report
        self._wake()

    def written(self, to_end: list[LeaseReport], to_release: list[LeaseReport]) -> None:
        """End or release the leases of jobs whose last frames were written."""
        if to_end:
            self.end(to_end)
        if to_release:
            self.release(to_release)

    async def settle(self) -> None:
        """Wait for leases to end or release, and settle them in the queue."""
        await self._has_work.wait()
        while self._to_release or self._to_end:
            if self._to_release:
                reports = list(self._to_release.values())
                await self._queue.extend(self._worker, reports, lease_ms=0)
            else:
                reports = list(self._to_end.values())
                await self._queue.finish(self._worker, *reports)
            self._remove(reports)
        self._has_work.clear()
        if not self._ending:
            self.settled.set()

    async def extend(self, running: Iterable[LeaseReport]) -> list[LeaseReport]:
        """Extend all leases. Return the reports in `running` whose leases are lost."""
        reports = {report.job_id: report for report in running}
        # If an old attempt waits to be ended while a new one runs, only the new one counts.
        everything = self._ending | reports
        if not everything:
            return []
        lost = await self._queue.extend(self._worker, everything.values(), lease_ms=self._lease_ms)
        return [reports[job_id] for job_id in lost if job_id in reports]

    def _remove(self, settled: Iterable[LeaseReport]) -> None:
        for report in settled:
            for reports in (self._to_release, self._to_end, self._ending):
                if reports.get(report.job_id) == report:
                    del reports[report.job_id]

    def _wake(self) -> None:
        self._has_work.set()
        self.settled.clear()
