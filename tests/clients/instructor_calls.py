"""Calls a chat endpoint with instructor in each mode, and prints the results as JSON.

Run by the Python of the clients' environment, with OPENAI_BASE_URL and OPENAI_API_KEY:
instructor_calls.py MODEL
"""

import json
import sys
from collections.abc import Iterable
from typing import Any, Literal

import instructor
from instructor import Instructor, Mode
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, ValidationError, field_validator


class Place(BaseModel):
    """Where it is."""

    city: Literal["Oslo", "Rome"]
    warm: bool


class Elsewhere(Place):
    """A place that never validates."""

    @field_validator("city")
    @classmethod
    def refuse(cls, city: str) -> str:
        """Refuse what the schema allows."""
        raise ValueError(f"not {city}")


class get_weather(BaseModel):  # noqa: N801 - the name of the tool
    """Get the weather in a city"""  # noqa: D415 - as in the training text of the demo model

    city: str


class Person(BaseModel):
    """What the demo model describes as JSON."""

    name: str
    age: int


ENFORCED = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.JSON_SCHEMA)
ATTEMPTS = 2


def main(model: str) -> None:
    """Make all calls, one after the other."""

    def ask(question: str, **options: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 500} | options

    def client(mode: Mode) -> Instructor:
        return instructor.from_openai(OpenAI(max_retries=0), mode=mode)

    where = ask("What is the capital of Italy?")
    weather = ask("What is the weather in Paris?", response_model=Iterable[get_weather])
    person = ask("Describe a person as JSON.", response_model=Person)
    reported = {
        mode.name: {
            "whole": client(mode).create(**where, response_model=Place).model_dump(),
            "partial": [
                partial.model_dump()
                for partial in client(mode).create_partial(**where, response_model=Place)
            ],
            "attempts": _attempts(client(mode), where),
        }
        for mode in ENFORCED
    }
    calls = client(Mode.PARALLEL_TOOLS).create(**weather)
    reported["PARALLEL_TOOLS"] = {"whole": [call.model_dump() for call in calls]}
    reported["JSON"] = {"whole": client(Mode.JSON).create(**person).model_dump()}
    print(json.dumps(reported))  # noqa: T201 - what it is called for


def _attempts(client: Instructor, question: dict[str, Any]) -> list[bool]:
    """Return whether each attempt had a response, which never validates."""
    try:
        client.create(**question, response_model=Elsewhere, max_retries=ATTEMPTS - 1)
    except InstructorRetryException as error:
        failed = [attempt.exception for attempt in error.failed_attempts or []]
        return [isinstance(exception, ValidationError) for exception in failed]
    return []


if __name__ == "__main__":
    main(*sys.argv[1:])
