"""Real coding agents, with a scripted model: a worker dies, a window is full, a prefill is long."""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from anthropic import Anthropic
from openai import OpenAI

from tests.e2e.clients.environments import AGENTS
from tests.failures.proofs.ledger import Row, open_books
from tests.support.processes import wait_until
from tests.support.stack import MODEL, Stack, metric, running_stack

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(700),
    AGENTS.skip,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]

WORKERS = ("worker-1", "worker-2")
TASK = "Greet everybody in the file, in order."
FILE = "greeting.txt"
LINES = [f"Good morning, {name}!" for name in ("Grace", "Edsger", "Barbara", "Donald", "Ada")]
PATCH = "\n".join(
    [
        "*** Begin Patch",
        f"*** Update File: {FILE}",
        "@@",
        f" {LINES[0]}",
        *(f"+{line}" for line in LINES[1:]),
        "*** End Patch\n",
    ]
)
SORT = f"sort -o {FILE} {FILE}"
DONE = f"The greetings are in {FILE}."
SUMMARY = "The numbers were printed."
WHEN_COMPACTING = "CONTEXT CHECKPOINT COMPACTION"
"""A part of the prompt by which Codex asks for a summary."""
PREFILL_SECONDS = 310
"""Codex and Claude Code give up after 300 s without an event."""
SILENCE_SECONDS = 20
"""After which the libraries of this test give up, and Claude Code shows that nothing happens."""
CODEX = """
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

Turns = list[dict[str, Any]]
Run = Callable[[Stack, Path], tuple[str, int, int]]
"""Runs an agent in a folder; returns its last text and the tokens that it has counted."""


def turns(*calls: tuple[str, dict[str, Any]]) -> Turns:
    """Return turns that each call one tool, and the answer."""
    called = [{"calls": [{"name": name, "arguments": arguments}]} for name, arguments in calls]
    return [{"text": "I look."} | called[0], *called[1:], {"text": DONE}]


def turns_of_codex(folder: Path) -> Turns:
    del folder
    return turns(
        ("exec_command", {"cmd": f"cat {FILE}"}),
        ("apply_patch", {"input": PATCH}),
        ("exec_command", {"cmd": SORT}),
    )


def turns_of_claude_code(folder: Path) -> Turns:
    path = str(folder / FILE)
    return turns(
        ("Read", {"file_path": path}),
        ("Edit", {"file_path": path, "old_string": LINES[0], "new_string": "\n".join(LINES)}),
        ("Bash", {"command": SORT, "description": "Sort the file"}),
    )


def turns_of_opencode(folder: Path) -> Turns:
    path = str(folder / FILE)
    return turns(
        ("read", {"filePath": path}),
        ("edit", {"filePath": path, "oldString": LINES[0], "newString": "\n".join(LINES)}),
        ("bash", {"command": SORT, "description": "Sort the file"}),
    )


def codex(stack: Stack, folder: Path) -> tuple[str, int, int]:
    key, home = stack.key(), folder.parent / "home"
    url = f"{stack.url}/v1/models?client_version=1"
    catalogue: dict[str, Any] = {}

    def is_listed() -> bool:
        catalogue.update(httpx.get(url, headers={"authorization": f"Bearer {key}"}).json())
        return bool(catalogue["models"])

    wait_until(is_listed, what="the model being listed")
    # The scripted engine enforces no grammar, so its catalogue has no patches of Codex.
    catalogue["models"][0]["apply_patch_tool_type"] = "freeform"
    (home / ".codex").mkdir(parents=True)
    catalog = home / "models.json"
    catalog.write_text(json.dumps(catalogue))
    config = CODEX.format(model=MODEL, catalog=catalog, url=stack.url)
    (home / ".codex" / "config.toml").write_text(config)
    options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = [str(AGENTS.programs / "codex"), "exec", *options, TASK]
    events = events_of(AGENTS.run(command, folder, HOME=str(home), SLUICE_KEY=key))
    items = [each["item"] for each in events if each["type"] == "item.completed"]
    assert [each for each in items if each["type"] == "error"] == []
    usage = events[-1]["usage"]
    return items[-1]["text"], usage["input_tokens"], usage["output_tokens"]


def claude_code(stack: Stack, folder: Path) -> tuple[str, int, int]:
    home = folder.parent / "home"
    home.mkdir()
    options = ["--output-format", "json", "--allowed-tools", "Read,Edit,Bash"]
    printed = AGENTS.run(
        [str(AGENTS.programs / "claude"), "--print", TASK, *options],
        folder,
        HOME=str(home),
        ANTHROPIC_BASE_URL=stack.url,
        ANTHROPIC_AUTH_TOKEN=stack.key(),
        ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    result = json.loads(printed)
    usage = result["usage"]
    prompts = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return result["result"], prompts, usage["output_tokens"]


def opencode(stack: Stack, folder: Path) -> tuple[str, int, int]:
    provider = {
        "npm": "@ai-sdk/anthropic",
        "options": {"baseURL": f"{stack.url}/v1", "apiKey": stack.key()},
        "models": {MODEL: {"limit": {"context": 200_000, "output": 8_000}}},
    }
    config = {"provider": {"sluice": provider}, "model": f"sluice/{MODEL}", "autoupdate": False}
    (folder / "opencode.json").write_text(json.dumps(config))
    home = folder.parent / "home"
    home.mkdir()
    # With a title, it does not ask the model for one.
    options = ["--title", "test", "--format", "json"]
    command = [str(AGENTS.programs / "opencode"), "run", *options, TASK]
    events = events_of(AGENTS.run(command, folder, HOME=str(home)))
    texts = [each["part"]["text"] for each in events if each["type"] == "text"]
    tokens = [each["part"]["tokens"] for each in events if each["type"] == "step_finish"]
    prompts = sum(each["input"] + each["cache"]["read"] for each in tokens)
    return texts[-1], prompts, sum(each["output"] for each in tokens)


def events_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def start(stack: Stack, sessions: Path, *workers: str, **environment: str) -> None:
    stack.start_gateway()
    stack.start_jobs()
    stack.start_beat()
    for name in workers:
        variables = {
            "SLUICE_ENGINE": "scripted",
            "SLUICE_SCRIPTED_SESSIONS": str(sessions),
            "SLUICE_SCRIPTED_STEP_SECONDS": "0.05",
            "SLUICE_CONTEXT_WINDOW": "200000",
            "SLUICE_LEASE_SECONDS": "2",
        }
        stack.start_worker(name, **variables | environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for an agent's work."""
    folder = tmp_path / "work"
    # Agents look for the repository that they are in.
    (folder / ".git").mkdir(parents=True)
    return folder


def script(folder: Path, sessions: dict[str, Turns]) -> Path:
    """Write what the model answers to prompts with a text; the first such text counts."""
    file = folder.parent / "sessions.json"
    listed = [{"when": when, "turns": turns} for when, turns in sessions.items()]
    file.write_text(json.dumps(listed))
    return file


def kill_the_running(stack: Stack) -> None:
    """Kill the worker that runs the second request, within the input of its call."""

    def running() -> list[str]:
        tokens = "sluice_worker_completion_tokens_total"
        return [name for name in WORKERS if metric(stack.worker_url(name), tokens) > 110]

    wait_until(lambda: bool(running()), what="a worker that generates")
    stack.kill(running()[0])


async def ledger(stack: Stack) -> list[Row]:
    async with open_books(stack) as books:
        await books.settled()
        return await books.rows()


@pytest.mark.parametrize(
    ("run", "turns"),
    [(codex, turns_of_codex), (claude_code, turns_of_claude_code), (opencode, turns_of_opencode)],
)
def test_agent_reads_edits_and_runs_although_its_worker_dies(
    folder: Path, run: Run, turns: Callable[[Path], Turns]
) -> None:
    (folder / FILE).write_text(f"{LINES[0]}\n")
    with running_stack() as stack, ThreadPoolExecutor() as threads:
        start(stack, script(folder, {TASK: turns(folder)}), *WORKERS)
        running = threads.submit(run, stack, folder)
        kill_the_running(stack)
        text, prompt_tokens, completion_tokens = running.result()
        assert text == DONE
        assert (folder / FILE).read_text().splitlines() == sorted(LINES)
        assert metric(stack.operators, "sluice_gateway_resumed_jobs_total") == 1
        rows = uvloop.run(ledger(stack))
        assert [row["outcome"] for row in rows] == ["finished"] * 4
        assert sum(row["prompt_tokens"] for row in rows) == prompt_tokens
        assert sum(row["completion_tokens"] for row in rows) == completion_tokens


def test_codex_compacts_a_conversation_that_outgrows_the_window(folder: Path) -> None:
    count = {"name": "exec_command", "arguments": {"cmd": "seq 20000"}}
    sessions: dict[str, Turns] = {
        # Codex omits old items until the request for a summary fits.
        WHEN_COMPACTING: [{"text": SUMMARY}] * 3,
        SUMMARY: [{"text": DONE}],
        TASK: [{"calls": [count]}],
    }
    with running_stack() as stack:
        start(stack, script(folder, sessions), "worker-1", SLUICE_CONTEXT_WINDOW="16000")
        text, prompt_tokens, _ = codex(stack, folder)
        assert text == DONE
        rows = uvloop.run(ledger(stack))
        before, summary, after = [row["prompt_tokens"] for row in rows]
        assert summary < after < before + 1_000
        assert before + summary + after == prompt_tokens


def test_clients_wait_for_a_long_prefill(folder: Path) -> None:
    asked: dict[str, Any] = {"model": MODEL, "timeout": SILENCE_SECONDS}
    prompt = "word " * 8_000 + TASK
    messages: list[Any] = [{"role": "user", "content": prompt}]

    def message(stack: Stack) -> str:
        with (
            Anthropic(base_url=stack.url, api_key=stack.key(), max_retries=0) as client,
            client.messages.stream(max_tokens=100, messages=messages, **asked) as stream,
        ):
            return stream.get_final_text()

    def response(stack: Stack) -> str:
        with (
            OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key(), max_retries=0) as client,
            client.responses.stream(input=prompt, **asked) as stream,
        ):
            return stream.get_final_response().output_text

    def chat(stack: Stack) -> str:
        with (
            OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key(), max_retries=0) as client,
            client.chat.completions.stream(messages=messages, **asked) as stream,
        ):
            return stream.get_final_completion().choices[0].message.content or ""

    def timed(run: Callable[[Stack], str]) -> tuple[str, bool]:
        began = time.monotonic()
        text = run(stack)
        return text, time.monotonic() - began > PREFILL_SECONDS

    runs = [lambda stack: codex(stack, folder)[0], message, response, chat]
    with running_stack() as stack, ThreadPoolExecutor() as threads:
        start(
            stack,
            script(folder, {TASK: [{"text": DONE}]}),
            "worker-1",
            SLUICE_SCRIPTED_PREFILL_SECONDS_PER_TOKEN=str(PREFILL_SECONDS / 8_000),
        )
        stack.key()
        assert [*threads.map(timed, runs)] == [(DONE, True)] * len(runs)
        # Nobody has tried again.
        assert [row["outcome"] for row in uvloop.run(ledger(stack))] == ["finished"] * len(runs)
