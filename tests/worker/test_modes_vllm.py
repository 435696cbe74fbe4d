"""Modes of vLLM that a CPU can run: sequences equal themselves again, alone and resumed."""

import json
from typing import Any

import pytest

from bench.starting import run_program
from tests.worker.real_engine import EXACT

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
def test_sequences_are_resumed_exactly(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default, vLLM binds each process to a NUMA node of its own.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = EXACT | {"engine_arguments": EXACT["engine_arguments"] | arguments}
    checks = {"rounds": 0, "sequences": 8, "tokens": 16, "after": [7]}
    results = run_program("bench.engine_checks", json.dumps({"settings": settings, **checks}))
    found = [(each["what"], each["equal"], each["of"]) for each in results if "what" in each]
    runs = (("again", 4), ("alone", 2), ("after 7", 4))
    assert found == [(what, number, number) for what, number in runs for _ in range(2)]
