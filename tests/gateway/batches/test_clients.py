"""Common clients run batches unchanged, and so do the examples in OpenAI's documentation."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
from openai import OpenAI

from tests.e2e.clients.environments import NODE, PROGRAMS, PYTHON, Environment
from tests.gateway.batches.conftest import CHATS, DOCUMENTED_MODEL, jsonl, line, wait_for
from tests.support.stack import Stack

IDS: Final = ["a", "b", "c"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "command"),
    [
        pytest.param(NODE, ("node", "batches.mjs"), marks=NODE.skip, id="OpenAI for Node"),
        pytest.param(
            PYTHON,
            ("python", "litellm_batches.py"),
            marks=[PYTHON.skip, pytest.mark.long],  # Its import takes most of the time.
            id="LiteLLM",
        ),
    ],
)
def test_client_runs_batches_unchanged(
    stack: Stack, tmp_path: Path, environment: Environment, command: tuple[str, str]
) -> None:
    program, file = command
    (tmp_path / file).write_text((PROGRAMS / file).read_text())
    printed = environment.run(
        (program, file),
        tmp_path,
        OPENAI_BASE_URL=f"{stack.gateways[1]}/v1",
        OPENAI_API_KEY=stack.key(f"client-{program}"),
        LINES=jsonl(*(line(each, CHATS) for each in IDS)).decode(),
    )
    found = json.loads(printed.splitlines()[-1])
    assert {*found.pop("output")} == {*IDS}
    assert found == {"status": "completed", "cancelled": "cancelling", "listed": True}


DOCUMENTED: Final = """
{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model":
 "gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are a helpful assistant."},
 {"role": "user", "content": "Hello world!"}],"max_tokens": 1000}}
{"custom_id": "request-2", "method": "POST", "url": "/v1/chat/completions", "body": {"model":
 "gpt-3.5-turbo-0125", "messages": [{"role": "system", "content": "You are an unhelpful
 assistant."}, {"role": "user", "content": "Hello world!"}],"max_tokens": 1000}}
""".replace("\n ", " ")
CREATE: Final = """
FILE=$(curl -s $API/v1/files -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -F purpose="batch" -F file="@batchinput.jsonl" | python3 -c "$ID")
curl -s $API/v1/batches -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '{ "input_file_id": "'$FILE'", "endpoint": "/v1/chat/completions",
        "completion_window": "24h" }' | python3 -c "$ID"
"""
READ: Final = """
curl -s $API/v1/batches/$BATCH -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json"
curl -s $API/v1/files/$OUTPUT/content -H "Authorization: Bearer $OPENAI_API_KEY" > out.jsonl
curl -s $API/v1/batches?limit=10 -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" > list.json
curl -s $API/v1/files/$OUTPUT -X DELETE -H "Authorization: Bearer $OPENAI_API_KEY" > deleted.json
"""
"""The commands of OpenAI's guide to batches (https://platform.openai.com/docs/guides/batch)."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_documented_examples_run(stack: Stack, tmp_path: Path) -> None:
    key = stack.key("reader")
    (tmp_path / "batchinput.jsonl").write_text(DOCUMENTED.strip() + "\n")
    variables = {
        "API": stack.url,
        "OPENAI_API_KEY": key,
        "ID": "import json, sys; print(json.load(sys.stdin)['id'])",
        "PATH": os.environ["PATH"],
    }

    def run(script: str, **more: str) -> str:
        return subprocess.run(
            ("bash", "-eu", "-o", "pipefail", "-c", script),
            cwd=tmp_path,
            env=variables | more,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    batch_id = run(CREATE).strip()
    with OpenAI(base_url=f"{stack.url}/v1", api_key=key) as openai:
        batch = wait_for(openai, batch_id)
    assert batch.output_file_id
    shown = json.loads(run(READ, BATCH=batch_id, OUTPUT=batch.output_file_id))
    assert shown["status"] == "completed"
    assert shown["model"] == DOCUMENTED_MODEL
    lines = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {each["custom_id"] for each in lines} == {"request-1", "request-2"}
    assert json.loads((tmp_path / "list.json").read_text())["data"][0]["id"] == batch_id
    assert json.loads((tmp_path / "deleted.json").read_text())["deleted"] is True
