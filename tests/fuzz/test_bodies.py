"""Thousands of bodies, sound, odd and broken, in every dialect: each gets an answer that can be read."""

import asyncio
from collections import Counter
from itertools import islice

import httpx
import pytest

from gateway.dialects.chat import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from tests.fuzz.bodies import CHATS, COMPLETIONS, Case, Target, different_cases
from tests.fuzz.chat_values import CHAT_SOUND
from tests.fuzz.sending import answers_of
from tests.fuzz.soundness import check_sound
from tests.fuzz.values import SOUND
from tests.fuzz.verdict import complaint
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.load, pytest.mark.timeout(900)]

BODIES = 9_000
SEED = 1
SHOWN = 5


def test_every_parameter_is_tried() -> None:
    # The model is the same in every body, and its name is tried where models are chosen.
    assert set(SOUND) == set(CompletionRequest.model_fields) - {"model"}
    assert set(CHAT_SOUND) == set(ChatCompletionRequest.model_fields) - {"model"}


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHATS], ids=lambda each: each.subject)
def test_every_answer_is_sound(target: Stack, endpoint: Target) -> None:
    sent = list(islice(different_cases(SEED, endpoint), BODIES))
    half = BODIES // 2
    answers = asyncio.run(shoot(target, sent[:half], sent[half:]))

    problems = []
    for case, answer in answers:
        problem = repr(answer) if isinstance(answer, Exception) else complaint(case, answer)
        if problem:
            problems.append(f"{problem}\n{case}")
    assert not problems, f"{len(problems)} of {BODIES}:\n" + "\n\n".join(problems[:SHOWN])
    statuses = Counter(a.status_code for _, a in answers if isinstance(a, httpx.Response))
    # The bodies are worth sending: many run, many are refused, nearly none finds the queue full.
    assert statuses[200] > BODIES // 4, statuses
    assert statuses[400] > BODIES // 10, statuses
    assert statuses[503] < BODIES // 100, statuses
    check_sound(target)


async def shoot(
    target: Stack, *volleys: list[Case]
) -> list[tuple[Case, httpx.Response | Exception]]:
    """Send a volley to each gateway, all at the same time."""
    shots = [
        answers_of(url, target.key(), volley)
        for url, volley in zip(target.gateways, volleys, strict=True)
    ]
    return [answer for answers in await asyncio.gather(*shots) for answer in answers]
