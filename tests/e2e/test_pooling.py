"""Pooling models on the real engine give the results of vLLM's own interface."""

import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.batches.conftest import run_sluice
from tests.support.patience import PATIENCE_SECONDS
from tests.support.pooling_models import (
    ADAPTER,
    CLASSIFY,
    EMBED,
    ENGINE_ARGUMENTS,
    JOINED,
    LABELS,
    QUERY,
    RERANKER,
    SEPARATED,
    TEMPLATE,
    TEXTS,
    model_folder,
)
from tests.support.processes import spawn, wait_until
from tests.support.stack import ENGINE_START_SECONDS, REPOSITORY, Stack, metric, running_stack
from worker.demo_model import ADAPTERS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3_600), pytest.mark.long]


@pytest.mark.parametrize("kind", [EMBED, CLASSIFY, JOINED, SEPARATED, RERANKER])
def test_results_are_those_of_vllm_itself(kind: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.support.pooling_models", kind, str(tmp_path)]
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "log").open("wb") as log:
        made = spawn(*program, cwd=REPOSITORY, stdout=log, stderr=log, env={**os.environ, **own})
        assert made.wait(ENGINE_START_SECONDS) == 0, (tmp_path / "log").read_text()
    expected = json.loads((tmp_path / "reference.json").read_text())
    environment = {
        "SLUICE_RUNNER": "pooling",
        "SLUICE_MODEL_PATH": str(model_folder(kind, tmp_path)),
        "SLUICE_MODEL_NAME": kind,
        "SLUICE_ENGINE_ARGUMENTS": json.dumps(ENGINE_ARGUMENTS[kind]),
        "SLUICE_TOOL_PARSER": "",
        "SLUICE_REASONING_PARSER": "",
    }
    if kind == EMBED:
        environment["SLUICE_ADAPTER_SLOTS"] = "1"
    if kind == RERANKER:
        (tmp_path / "score.jinja").write_text(TEMPLATE)
        environment["SLUICE_CHAT_TEMPLATE"] = str(tmp_path / "score.jinja")
    with running_stack() as stack:
        stack.launch_worker(environment=environment)
        stack.start_gateway()
        stack.await_worker()
        check(stack, kind, expected)
        if kind == EMBED:
            check_adapter(stack, expected)
            check_replacement(stack, environment, expected)


def check(stack: Stack, kind: str, expected: list[Any]) -> None:
    headers = {"authorization": f"Bearer {stack.key()}"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=PATIENCE_SECONDS) as client:
        wait_until(
            lambda: client.get(f"/v1/models/{kind}").json().get("ready", False),
            what=f"{kind} being ready",
        )
        if kind == EMBED:
            found = client.post("/v1/embeddings", json={"model": kind, "input": TEXTS}).json()
            for item, vector in zip(found["data"], expected, strict=False):
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


def check_adapter(stack: Stack, expected: list[Any]) -> None:
    """Vectors with an adapter are those of vLLM, and those without it stay as they are."""
    headers = {"authorization": f"Bearer {stack.key('acme')}"}
    source = ("--base-model", EMBED, "--source", str(ADAPTERS / ADAPTER))
    run_sluice(stack, "adapters", "add", "--tenant", "acme", ADAPTER, *source)
    with httpx.Client(base_url=stack.url, headers=headers, timeout=PATIENCE_SECONDS) as client:
        wait_until(
            lambda: client.get(f"/v1/models/{ADAPTER}").status_code == 200, what="the adapter"
        )
        for model, start in ((ADAPTER, len(TEXTS)), (EMBED, 0)):
            found = client.post("/v1/embeddings", json={"model": model, "input": TEXTS}).json()
            for item, vector in zip(found["data"], expected[start:], strict=False):
                assert cosine(item["embedding"], vector) > 0.9999
    assert cosine(expected[0], expected[len(TEXTS)]) < 0.999


def check_replacement(stack: Stack, environment: dict[str, str], expected: list[Any]) -> None:
    """Kill the worker while embeddings run; another one completes them, and all are billed once."""
    stack.start_jobs()
    stack.start_beat()
    headers = {"authorization": f"Bearer {stack.key()}"}
    texts = TEXTS * 300
    written = "sluice_worker_frames_written_total"
    began = metric(stack.worker_url(), written)
    with (
        httpx.Client(base_url=stack.url, headers=headers, timeout=ENGINE_START_SECONDS) as client,
        ThreadPoolExecutor() as pool,
    ):
        whole = client.post("/v1/embeddings", json={"model": EMBED, "input": TEXTS}).json()
        body = {"model": EMBED, "input": texts}
        asking = pool.submit(client.post, "/v1/embeddings", json=body)
        wait_until(
            lambda: metric(stack.worker_url(), written) >= began + 3, what="the first results"
        )
        assert not asking.done()
        stack.kill("worker")
        stack.launch_worker("replacement", environment)
        found = asking.result().json()
        for index, item in enumerate(found["data"]):
            assert cosine(item["embedding"], expected[index % len(TEXTS)]) > 0.9999
        used = whole["usage"]["prompt_tokens"] * len(texts) // len(TEXTS)
        assert found["usage"] == {"prompt_tokens": used, "total_tokens": used}
        path = f"/v1/usage/requests/{found['id']}"
        wait_until(lambda: client.get(path).status_code == 200, what="the receipt")
        receipt = client.get(path).json()
        assert (receipt["prompt_tokens"], receipt["completion_tokens"]) == (used, 0)
        assert receipt["outcome"] == "finished"


def cosine(one: list[float], other: list[float]) -> float:
    size = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / size
