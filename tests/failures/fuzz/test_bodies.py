"""Thousands of bodies, sound, odd and broken, in every dialect: each gets a valid response."""

import asyncio
from collections import Counter
from itertools import islice

import httpx
import pytest

from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from tests.e2e.examples import LONG
from tests.failures.fuzz.bodies import (
    CHATS,
    COMPLETIONS,
    NEARLY_SOUND,
    ODDITIES,
    Case,
    Target,
    different_cases,
)
from tests.failures.fuzz.chat_values import CHAT_SOUND
from tests.failures.fuzz.conftest import REAL, SCRIPTED
from tests.failures.fuzz.sending import answers_of
from tests.failures.fuzz.soundness import check_sound
from tests.failures.fuzz.values import SOUND
from tests.failures.fuzz.verdict import OVERLOADED, complaint
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.load]

BODIES = {REAL: 100, SCRIPTED: 200}
"""For each endpoint. They are the same in every run: more would find little that is new."""
LONG_BODIES = 9_000
FUZZER = "fuzzer"
"""A tenant, so that others get their share of the engine meanwhile."""
SEED = 1
SHOWN = 5


def test_bodies_cover_every_parameter() -> None:
    # Every body has the same model; other tests cover the parameter.
    assert set(SOUND) == set(CompletionRequest.model_fields) - {"model"}
    assert set(CHAT_SOUND) == set(ChatCompletionRequest.model_fields) - {"model"}


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHATS], ids=lambda each: each.subject)
@pytest.mark.parametrize("engine", [pytest.param(REAL, marks=pytest.mark.slow), SCRIPTED])
def test_every_body_gets_a_valid_response(
    request: pytest.FixtureRequest, target: Stack, engine: str, endpoint: Target
) -> None:
    is_long = request.config.getoption("--long")
    bodies = LONG_BODIES if is_long else BODIES[engine]
    # Most bodies that are sent to a real engine should reach it.
    oddities = NEARLY_SOUND if engine == REAL and not is_long else ODDITIES
    sent = list(islice(different_cases(SEED, endpoint, oddities), bodies))
    half = bodies // 2
    answers = asyncio.run(send(target, target.key(FUZZER), sent[:half], sent[half:]))

    problems = []
    for case, answer in answers:
        problem = repr(answer) if isinstance(answer, Exception) else complaint(case, answer)
        if problem:
            problems.append(f"{problem}\n{case}")
    assert not problems, f"{len(problems)} of {bodies}:\n" + "\n\n".join(problems[:SHOWN])
    # Each body counts by its last response: how many find a queue full depends on the machine.
    last = {
        case: answer.status_code for case, answer in answers if isinstance(answer, httpx.Response)
    }
    statuses = Counter(last.values())
    # The bodies are a useful mix: many run, and many are refused.
    assert statuses[200] > bodies // 4, statuses
    assert statuses[400] > bodies // 10, statuses
    assert not statuses[OVERLOADED], statuses
    check_sound(target, text=LONG.completion if engine == REAL else None)


async def send(
    target: Stack, key: str, *volleys: list[Case]
) -> list[tuple[Case, httpx.Response | Exception]]:
    """Send the requests to all gateways, concurrently."""
    tasks = [
        answers_of(url, key, volley) for url, volley in zip(target.gateways, volleys, strict=True)
    ]
    return [answer for answers in await asyncio.gather(*tasks) for answer in answers]
