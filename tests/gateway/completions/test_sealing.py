"""Sealed reasoning: who can open it, and what becomes of the rest."""

import base64

import pytest

from gateway.completions.sealing import Sealer
from gateway.dialects.request import ChatRequest
from tests.gateway.replies import completion

TEXT = "Let me see… 42."


def sealed(
    *, secret: str = "first", tenant: str = "acme", model: str = "m", request: str = "msg_1"
) -> str:
    seal = Sealer([secret]).seal_of(request, completion(sealed_for=model).request, tenant_id=tenant)
    assert seal is not None
    return seal(TEXT, 0)


def opened(blob: str) -> str | None:
    return Sealer(["second", "first"]).open(blob, tenant_id="acme", model="m")


def test_reasoning_is_sealed_alike_in_every_replay_and_opened_with_an_older_key() -> None:
    assert sealed() == sealed() != sealed(request="msg_2")
    assert "42" not in base64.b64decode(sealed()).decode("latin-1")
    assert opened(sealed()) == TEXT


@pytest.mark.parametrize(
    "blob",
    [
        sealed(secret="other"),
        sealed(tenant="another"),
        sealed(model="m2"),
        sealed()[:-4] + "AAA=",
        sealed()[:20],
        "EqoBCkgIARAB",
        "not base64 ü",
        "",
    ],
)
def test_foreign_and_broken_reasoning_is_dropped(blob: str) -> None:
    messages = [
        {"role": "assistant", "content": "a", "sealed": blob, "reasoning": "shown"},
        {"role": "assistant", "content": "b", "sealed": sealed()},
    ]
    chat = Sealer(["first"]).opened(ChatRequest(messages=messages), tenant_id="acme", model="m")
    assert chat.messages == [
        {"role": "assistant", "content": "a", "reasoning": "shown"},
        {"role": "assistant", "content": "b", "reasoning": TEXT, "reasoning_content": TEXT},
    ]
