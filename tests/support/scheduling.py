"""Which tests run in one process, one after the other, where several processes share them (pytest-xdist)."""

from typing import Final

from xdist.scheduler import LoadScopeScheduling

TOGETHER: Final = ("tests/e2e/", "tests/proofs/")
"""Folders whose tests share servers and engines that take long to start: one process runs each."""
APART: Final = ("tests/e2e/test_worker_kills.py",)
"""Files of these folders with servers of their own."""


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives each process whole files, and some folders as a whole, in the order in which they stand."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Return the name of what a test runs together with."""
    file = nodeid.partition("::")[0]
    if file in APART:
        return file
    return next((folder for folder in TOGETHER if file.startswith(folder)), file)
