"""The order of the tests, and groups of tests that one process runs (pytest-xdist)."""

from typing import Final

from xdist.scheduler import LoadScopeScheduling

VLLM: Final = "what imports vLLM"
SAMPLERS: Final = "the engines of the samplers"
TOGETHER: Final = {
    # Says what has changed in a library, before what depends on it fails.
    "tests/test_private_parts.py": "private parts",
    # Tests that share an engine or a deployment run in the process that started it. The longest
    # begin first, so that no process is left with one at the end.
    "tests/worker/test_resumption_vllm.py": VLLM,
    "tests/worker/test_chat_resumption_vllm.py": VLLM,
    "tests/worker/test_vllm_engine.py": VLLM,
    "tests/worker/test_preemption_vllm.py": VLLM,
    "tests/worker/test_pooling_vllm.py": VLLM,
    "tests/worker/samplers/test_engine.py": SAMPLERS,
    "tests/worker/samplers/test_resumption.py": SAMPLERS,
    "tests/failures/chaos/test_planted_faults.py": "planted faults",
    "tests/e2e/test_hostile_structure.py": "hostile structures",
    # Alone with the shared deployment, best before others use it.
    "tests/e2e/test_disconnect.py": "hostile structures",
    "tests/failures/proofs/test_everything_dies.py": "deployment that dies",
    "tests/failures/proofs/test_outages.py": "deployment that dies",
    "tests/failures/fuzz/": "fuzz",
    # The next file continues with one of its workers.
    "tests/failures/kills/test_two_workers.py": "killed workers",
    "tests/failures/kills/": "killed workers",
    "tests/failures/proofs/test_cluster.py": "proofs on a cluster",
    "tests/failures/proofs/": "proofs",
    "tests/failures/chaos/test_chaos.py": "chaos",
    "tests/worker/test_vision.py": VLLM,
    "tests/worker/test_vllm_metrics.py": VLLM,
    "tests/worker/samplers/test_v1.py": VLLM,
    "tests/worker/test_parser_format.py": VLLM,
    "tests/worker/parsing/": VLLM,
    "tests/gateway/completions/structure/test_translate.py": VLLM,
    "tests/failures/outages/test_rolling_restart.py": "outages",
    "tests/failures/outages/test_redis_away.py": "outages",
    "tests/failures/outages/test_sentinel.py": "watched Redis",
    "tests/failures/outages/test_closed_connections.py": "watched Redis",
    "tests/gateway/cli/test_up.py": "sluice up",
    "tests/failures/overload/": "overload",
    "tests/gateway/console/": "console",
}
"""Files and folders, in this order; one process runs all that have the same name."""
EARLY: Final = (
    # Single files that take longer than the last files of all processes.
    "tests/failures/outages/",
    "tests/gateway/limits/test_interleavings.py",
    "tests/e2e/",
    # These share the deployment of tests/gateway/conftest.py, which ends when a process leaves it.
    "tests/gateway/accounts/test_http_",
    "tests/gateway/adapters/",
    "tests/gateway/billing/test_http_",
    "tests/gateway/completions/",
    "tests/gateway/dialects/",
    "tests/gateway/http/",
    "tests/gateway/batches/",
    "tests/worker/",
    "tests/contract/",
    "tests/telemetry/",
    "tests/deploy/",
    "tests/gateway/jobs/",
    "tests/gateway/cli/",
    "tests/test_docs.py",
    "tests/gateway/billing/",
    "tests/gateway/accounts/",
)
"""What comes next; the rest has short files, of which every process ends with some."""


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """Gives each process whole files or groups, in order."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Return the name of a test's group."""
    file = nodeid.partition("::")[0]
    return next((group for path, group in TOGETHER.items() if file.startswith(path)), file)


def rank_of(nodeid: str) -> int:
    """Return the position of a test in the order."""
    ranks = (rank for rank, path in enumerate((*TOGETHER, *EARLY)) if nodeid.startswith(path))
    return next(ranks, len(TOGETHER) + len(EARLY))
