"""Pooling models on the real engine give the results of vLLM's own interface."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.patience import PATIENCE_SECONDS
from tests.support.pooling_models import (
    CLASSIFY,
    EMBED,
    ENGINE_ARGUMENTS,
    JOINED,
    LABELS,
    QUERY,
    SEPARATED,
    TEXTS,
    model_folder,
)
from tests.support.processes import spawn, wait_until
from tests.support.stack import ENGINE_START_SECONDS, REPOSITORY, Stack, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600), pytest.mark.long]


@pytest.mark.parametrize("kind", [EMBED, CLASSIFY, JOINED, SEPARATED])
def test_results_are_those_of_vllm_itself(kind: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.support.pooling_models", kind, str(tmp_path)]
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "log").open("wb") as log:
        made = spawn(*program, cwd=REPOSITORY, stdout=log, stderr=log, env={**os.environ, **own})
        assert made.wait(ENGINE_START_SECONDS) == 0, (tmp_path / "log").read_text()
    expected = json.loads((tmp_path / "reference.json").read_text())
    with running_stack() as stack:
        stack.launch_worker(
            environment={
                "SLUICE_RUNNER": "pooling",
                "SLUICE_MODEL_PATH": str(model_folder(kind, tmp_path)),
                "SLUICE_MODEL_NAME": kind,
                "SLUICE_ENGINE_ARGUMENTS": json.dumps(ENGINE_ARGUMENTS[kind]),
                "SLUICE_TOOL_PARSER": "",
                "SLUICE_REASONING_PARSER": "",
            }
        )
        stack.start_gateway()
        stack.await_worker()
        check(stack, kind, expected)


def check(stack: Stack, kind: str, expected: list[Any]) -> None:
    headers = {"authorization": f"Bearer {stack.key()}"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=PATIENCE_SECONDS) as client:
        wait_until(
            lambda: client.get(f"/v1/models/{kind}").json().get("ready", False),
            what=f"{kind} being ready",
        )
        if kind == EMBED:
            found = client.post("/v1/embeddings", json={"model": kind, "input": TEXTS}).json()
            for item, vector in zip(found["data"], expected, strict=True):
                assert cosine(item["embedding"], vector) > 0.9999
        elif kind == CLASSIFY:
            found = client.post("/v1/classify", json={"model": kind, "input": TEXTS}).json()
            for item, probabilities in zip(found["data"], expected, strict=True):
                assert item["probs"] == pytest.approx(probabilities, abs=1e-4)
                assert item["label"] == LABELS[probabilities.index(max(probabilities))]
        else:
            body = {"model": kind, "query": QUERY, "documents": TEXTS}
            found = client.post("/rerank", json=body).json()
            scores = {each["index"]: each["relevance_score"] for each in found["results"]}
            assert scores == pytest.approx(dict(enumerate(expected)), abs=1e-4)
            assert len(set(scores.values())) == len(TEXTS)


def cosine(one: list[float], other: list[float]) -> float:
    size = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / size
