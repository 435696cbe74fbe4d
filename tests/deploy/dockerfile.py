"""A reader of this repository's Dockerfiles: instructions, stages, copied files."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.stack import REPOSITORY

FOLDER: Final = REPOSITORY / "deploy" / "docker"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its continued lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Its arguments, in JSON form or shell form."""
        if not self.text.startswith("["):
            return shlex.split(self.text)
        words: list[str] = json.loads(self.text)
        return words

    @property
    def options(self) -> dict[str, str]:
        """Its options, such as `--from=build`."""
        given = [word[2:].partition("=") for word in self.words if word.startswith("--")]
        return {name: value for name, _, value in given}


@dataclass(frozen=True, slots=True)
class Stage:
    """A FROM and the instructions after it."""

    name: str
    image: str
    instructions: list[Instruction]

    def last(self, name: str) -> Instruction:
        """Return the last instruction of a kind, which takes effect. Raises IndexError."""
        return [each for each in self.instructions if each.name == name][-1]


def stages(path: Path, **arguments: str) -> list[Stage]:
    """Return the stages of a Dockerfile that is built with arguments."""
    found: list[Stage] = []
    for instruction in _instructions(path.read_text(), arguments):
        if instruction.name == "FROM":
            image, *alias = instruction.words
            found.append(Stage(alias[1] if alias else "", image, []))
        elif found:
            found[-1].instructions.append(instruction)
    return found


def sources(stage: Stage) -> list[str]:
    """Return what a stage copies from the build's context."""
    copies = [each for each in stage.instructions if each.name == "COPY"]
    words = [each.words for each in copies if "from" not in each.options]
    return [source for each in words for source in each[:-1] if not source.startswith("--")]


def _instructions(text: str, arguments: dict[str, str]) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    for name, value in arguments.items():
        joined = [line.replace(f"${{{name}}}", value) for line in joined]
    pairs = [line.split(maxsplit=1) for line in joined]
    return [Instruction(name.upper(), rest.strip()) for name, rest in pairs]
