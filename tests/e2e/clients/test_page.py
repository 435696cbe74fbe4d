"""Every snippet for customers, of their quickstart and the cookbook, run as it is on the page."""

import re
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.e2e.clients.environments import AIDER, LM_EVAL, LOAD, NODE, PYTHON, VLLM, Environment
from tests.support.stack import REPOSITORY, Stack

PAGE: Final = REPOSITORY / "docs" / "clients.md"
LONG: Final = pytest.mark.long
SLOW: Final = pytest.mark.slow

SECTIONS: Final[dict[str, tuple[Environment, *tuple[pytest.MarkDecorator, ...]]]] = {
    "OpenAI for Python": (PYTHON,),
    "OpenAI for Node": (NODE,),
    "Anthropic for Python": (PYTHON,),
    "Anthropic for Node": (NODE,),
    "Vercel AI SDK": (NODE, SLOW),
    "LangChain": (PYTHON, SLOW),
    "OpenAI Agents": (PYTHON, SLOW),
    "Pydantic AI": (PYTHON, LONG),
    "LlamaIndex": (PYTHON, LONG),
    "LiteLLM": (PYTHON, LONG),
    "instructor": (PYTHON, SLOW),
    "DSPy": (PYTHON, LONG),
    "Hugging Face": (PYTHON, SLOW),
    "llm": (PYTHON, LONG),
    "aider": (AIDER, LONG),
    "Continue": (NODE, SLOW),
    "lm-eval": (LM_EVAL, LONG),
    "GuideLLM": (LOAD, LONG),
    "vllm bench serve": (VLLM, LONG),
    "SGLang": (LOAD, LONG),
}
"""The environment that runs each section, and marks of its test.

Sections of clients that take long to import, and send what another client sends, run in slow or
long tests.
"""

INTERPRETERS: Final = {
    "sh": ("bash", "-eu", "-o", "pipefail"),
    "python": ("python",),
    "js": ("node",),
}
"""Programs that run a snippet by the language of its block."""
SUFFIXES: Final = {"sh": "sh", "python": "py", "js": "mjs"}


class Block(NamedTuple):
    """A fenced block of the page."""

    language: str
    title: str | None
    """The name of the file that has this text, if it is not a snippet to run."""
    text: str


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a section."""
    fences = re.findall(
        r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text, re.DOTALL | re.MULTILINE
    )
    assert len(fences) * 2 == len(re.findall("^```", text, re.MULTILINE))
    return [Block(language, title or None, text) for language, title, text in fences]


HEAD, *_SECTIONS = re.split(r"^## (.+)\n", PAGE.read_text(), flags=re.MULTILINE)
TEXTS: Final = dict(zip(_SECTIONS[::2], _SECTIONS[1::2], strict=True))
VARIABLES: Final = [block.text for block in blocks_of(HEAD)]
"""Shell commands that set the variables of all snippets."""


def test_every_section_is_run() -> None:
    assert list(TEXTS) == list(SECTIONS)
    assert re.findall(r"^\| \[(.+?)\]", HEAD, re.MULTILINE) == list(SECTIONS)
    for text in TEXTS.values():
        assert {block.language for block in blocks_of(text)} & INTERPRETERS.keys()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("section", "environment"),
    [
        pytest.param(section, environment, marks=[environment.skip, *marks], id=section)
        for section, (environment, *marks) in SECTIONS.items()
    ],
)
def test_snippets(stack: Stack, tmp_path: Path, section: str, environment: Environment) -> None:
    (tmp_path / "variables.sh").write_text("\n".join(VARIABLES))
    (tmp_path / "worker").symlink_to(REPOSITORY / "worker")
    (tmp_path / ".sluice").mkdir()
    (tmp_path / ".sluice" / "demo.env").write_text(
        f"SLUICE_URL={stack.url}\nSLUICE_KEY={stack.key()}\n"
    )
    printed = None
    for number, block in enumerate(blocks_of(TEXTS[section])):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "text":
            assert printed is not None
            assert re.fullmatch(pattern_of(block.text), printed, re.DOTALL), printed
        else:
            snippet = f"snippet_{number}.{SUFFIXES[block.language]}"
            (tmp_path / snippet).write_text(block.text)
            command = " ".join(INTERPRETERS[block.language])
            printed = environment.run(
                ("bash", "-euc", f". ./variables.sh; exec {command} {snippet}"),
                tmp_path,
            )


@pytest.mark.e2e
def test_quickstart_of_customers(stack: Stack, tmp_path: Path) -> None:
    script = [f"export SLUICE_URL={stack.url} SLUICE_KEY={stack.key()}"]
    for block in blocks_of((REPOSITORY / "docs" / "start-as-a-customer.md").read_text()):
        if block.language == "sh" and not block.text.startswith("pip "):
            script.append(block.text)
        elif block.language == "python":
            script.append(f"python - <<'END'\n{block.text}END")
    environment = Environment("dev", Path(sys.executable).parent)
    printed = environment.run(("bash", "-uc", "\n".join(script)), tmp_path)
    assert "The capital of France is Paris." in printed
    assert "'temperature' must be at most 2.0. Given: 3." in printed
    assert re.search(r"The capital of Italy is Rome\.\s+\d+ tokens", printed)
    numbers = [int(number) for number in re.findall(r"^id: cmpl-\w+:(\d+)$", printed, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert "data: [DONE]" in printed
    assert '"object":"limits"' in printed


@pytest.mark.e2e
def test_cookbook(stack: Stack, tmp_path: Path) -> None:
    environment = Environment("dev", Path(sys.executable).parent)
    blocks = blocks_of((REPOSITORY / "docs" / "cookbook.md").read_text())
    printed = [
        environment.run(
            ("python", "-c", block.text),
            tmp_path,
            OPENAI_BASE_URL=f"{stack.url}/v1",
            OPENAI_API_KEY=stack.key(),
        )
        for block in blocks
        if block.language == "python"
    ]
    tools, structured = printed
    assert "get_weather {'city': 'Paris'}" in tools
    assert tools.rpartition("}")[2].strip()
    assert re.fullmatch(r"\{'city': '(Rome|Paris)', 'is_capital': (True|False)\}\n", structured)


def pattern_of(text: str) -> str:
    """Return a regular expression for what a snippet prints, where `...` stands for any text."""
    return r"\s*" + re.escape(text.strip()).replace(r"\.\.\.", ".*?") + r"\s*"
