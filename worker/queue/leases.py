"""Leases of claimed jobs: renewed while jobs run, ended with their counts, or handed back."""

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
        self._to_hand_back: dict[str, LeaseReport] = {}
        self._work = asyncio.Event()
        self.settled = asyncio.Event()
        """Set while no lease waits to be ended or handed back."""
        self.settled.set()

    def hold_until_written(self, report: LeaseReport) -> None:
        """Keep the lease of a job that no longer runs until `end` or `hand_back`."""
        self._ending[report.job_id] = report
        self.settled.clear()

    def end(self, reports: Iterable[LeaseReport]) -> None:
        """End leases permanently."""
        for report in reports:
            self._ending[report.job_id] = report
            self._to_end[report.job_id] = report
        self._ring()

    def hand_back(self, reports: Iterable[LeaseReport]) -> None:
        """Expire leases now, so that other workers can claim the jobs."""
        for report in reports:
            self._ending[report.job_id] = report
            self._to_hand_back[report.job_id] = report
        self._ring()

    def written(self, ended: list[LeaseReport], handed_back: list[LeaseReport]) -> None:
        """End and hand back leases of jobs whose last frames were written."""
        if ended:
            self.end(ended)
        if handed_back:
            self.hand_back(handed_back)

    async def settle(self) -> None:
        """Wait for leases to end or hand back, and settle them in the queue."""
        await self._work.wait()
        while self._to_hand_back or self._to_end:
            if self._to_hand_back:
                reports = list(self._to_hand_back.values())
                await self._queue.extend(self._worker, reports, lease_ms=0)
            else:
                reports = [next(iter(self._to_end.values()))]
                await self._queue.finish(self._worker, reports[0])
            self._forget(reports)
        self._work.clear()
        if not self._ending:
            self.settled.set()

    async def extend(self, running: Iterable[LeaseReport]) -> list[LeaseReport]:
        """Renew all leases. Return those of `running` that are lost."""
        reports = {report.job_id: report for report in running}
        # If an old attempt waits to be ended while a new one runs, only the new one counts.
        everything = self._ending | reports
        if not everything:
            return []
        lost = await self._queue.extend(self._worker, everything.values(), lease_ms=self._lease_ms)
        return [reports[job_id] for job_id in lost if job_id in reports]

    def _forget(self, settled: Iterable[LeaseReport]) -> None:
        for report in settled:
            for reports in (self._to_hand_back, self._to_end, self._ending):
                if reports.get(report.job_id) == report:
                    del reports[report.job_id]

    def _ring(self) -> None:
        self._work.set()
        self.settled.clear()
