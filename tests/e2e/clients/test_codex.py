"""The real Codex edits a file, with a scripted model, while its worker is killed."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.clients.environments import NODE
from tests.support.processes import wait_until
from tests.support.stack import MODEL, Stack, metric, running_stack

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (NODE.programs / "codex").exists() or shutil.which("node") is None,
        reason="Codex is not installed (scripts/setup.sh npm)",
    ),
]

WORKERS = ("worker-1", "worker-2")
TASK = "Write the greeting to a file."
LINES = [f"Good morning, {name}!" for name in ("Ada", "Grace", "Edsger", "Barbara", "Donald")]
PATCH = "\n".join(
    [
        "*** Begin Patch",
        "*** Add File: greeting.txt",
        *(f"+{line}" for line in LINES),
        "*** End Patch",
    ]
)
TURNS: list[dict[str, Any]] = [
    {"text": "I add it.", "calls": [{"name": "apply_patch", "arguments": {"input": f"{PATCH}\n"}}]},
    {"text": "", "calls": [{"name": "exec_command", "arguments": {"cmd": "cat greeting.txt"}}]},
    {"text": "The greeting is in greeting.txt."},
]
CONFIG = """
model = "{model}"
model_provider = "sluice"
model_catalog_json = "{catalog}"

[model_providers.sluice]
name = "Sluice"
base_url = "{url}/v1"
env_key = "SLUICE_KEY"
wire_api = "responses"
supports_websockets = false
"""


def start(stack: Stack, folder: Path) -> None:
    sessions = folder / "sessions.json"
    sessions.write_text(json.dumps([{"when": TASK, "turns": TURNS}]))
    stack.start_gateway()
    for name in WORKERS:
        stack.start_worker(
            name,
            SLUICE_ENGINE="scripted",
            SLUICE_SCRIPTED_SESSIONS=str(sessions),
            SLUICE_SCRIPTED_STEP_SECONDS="0.05",
            SLUICE_CONTEXT_WINDOW="200000",
            SLUICE_LEASE_SECONDS="2",
        )


def catalogue(stack: Stack) -> dict[str, Any]:
    """Return the gateway's catalogue; Codex offers its patches if it says so."""
    headers = {"authorization": f"Bearer {stack.key()}"}
    url = f"{stack.url}/v1/models?client_version=1"
    found: dict[str, Any] = {}

    def is_listed() -> bool:
        found.update(httpx.get(url, headers=headers).json())
        return bool(found["models"])

    wait_until(is_listed, what="the model being listed")
    found["models"][0]["apply_patch_tool_type"] = "freeform"
    return found


def kill_the_running(stack: Stack) -> None:
    """Kill the worker that runs a request, after some of its tokens."""

    def running() -> list[str]:
        tokens = "sluice_worker_completion_tokens_total"
        return [name for name in WORKERS if metric(stack.worker_url(name), tokens) > 30]

    wait_until(lambda: bool(running()), what="a worker that generates")
    stack.kill(running()[0])


def test_codex_edits_a_file_although_its_worker_dies(tmp_path: Path) -> None:
    with running_stack() as stack, ThreadPoolExecutor() as threads:
        start(stack, tmp_path)
        home, work = tmp_path / "home", tmp_path / "work"
        (home / ".codex").mkdir(parents=True)
        work.mkdir()
        catalog = home / "models.json"
        catalog.write_text(json.dumps(catalogue(stack)))
        config = CONFIG.format(model=MODEL, catalog=catalog, url=stack.url)
        (home / ".codex" / "config.toml").write_text(config)
        options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        command = [str(NODE.programs / "codex"), "exec", *options, TASK]
        variables = {"HOME": str(home), "SLUICE_KEY": stack.key()}
        running = threads.submit(NODE.run, command, work, **variables)
        kill_the_running(stack)
        printed = running.result()
        events: list[Any] = [json.loads(each) for each in printed.splitlines() if each[:1] == "{"]
        assert (work / "greeting.txt").read_text().splitlines() == LINES
        items = [each["item"] for each in events if each["type"] == "item.completed"]
        assert [each for each in items if each["type"] == "error"] == []
        assert items[-1]["text"] == TURNS[-1]["text"]
        assert metric(stack.operators, "sluice_gateway_resumed_jobs_total") == 1
