"""Which tests run in one process, one after the other, where several processes share them (pytest-xdist)."""

from typing import Final

from xdist.scheduler import LoadScopeScheduling

ENGINES: Final = "real engines"
TOGETHER: Final = {
    # Engines beside each other take too long to start, and everything else waits for them.
    "tests/worker/test_chat_resumption_vllm.py": ENGINES,
    "tests/worker/test_resumption_vllm.py": ENGINES,
    "tests/worker/test_vision.py": ENGINES,
    "tests/worker/test_vllm_engine.py": ENGINES,
    "tests/worker/test_vllm_process.py": ENGINES,
    "tests/samplers/test_engine.py": ENGINES,
    "tests/samplers/test_resumption.py": ENGINES,
    "tests/telemetry/test_vllm_metrics.py": ENGINES,
    "tests/kills/": ENGINES,
    "tests/e2e/": ENGINES,
    # They share a deployment.
    "tests/proofs/": "tests/proofs/",
}
"""Files and folders of which one process runs all that have the same name, in this order."""


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives each process whole files, or what is to run together, in the order in which they stand."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Return the name of what a test runs together with."""
    file = nodeid.partition("::")[0]
    return next((group for path, group in TOGETHER.items() if file.startswith(path)), file)


def rank_of(nodeid: str) -> int:
    """Return when a test's turn is among those that run together."""
    return next((rank for rank, path in enumerate(TOGETHER) if nodeid.startswith(path)), 0)
