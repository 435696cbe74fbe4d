"""Sealed reasoning: who can open it, and what becomes of the rest."""

import base64
from dataclasses import replace

import msgspec
import pytest

from gateway.completions.sealing import Sealer
from gateway.dialects.parameters import MAX_NAMED
from gateway.dialects.request import ChatRequest, Sealed
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
def test_foreign_and_broken_reasoning_is_dropped_and_named(blob: str) -> None:
    turn = [Sealed(blob, "a"), Sealed(sealed(), "b"), "shown", Sealed(sealed(), "c")]
    chat = ChatRequest(
        messages=[
            {"role": "assistant", "content": "a", "sealed": [Sealed(blob, f"d[{number}]")]}
            for number in range(MAX_NAMED)
        ]
        + [{"role": "assistant", "content": "b", "sealed": turn}]
    )
    request = completion(chat=chat, sealed_for="m").request
    read = Sealer(["first"]).opened(request, tenant_id="acme", model="m")
    assert read.chat
    text = f"{TEXT}\nshown\n{TEXT}"
    assert read.chat.messages == [
        *[{"role": "assistant", "content": "a"}] * MAX_NAMED,
        {"role": "assistant", "content": "b", "reasoning": text, "reasoning_content": text},
    ]
    assert read.ignored_parameters == tuple(sorted(f"d[{each}]" for each in range(MAX_NAMED)))
    alone = replace(chat, messages=chat.messages[-1:])
    request = msgspec.structs.replace(request, chat=alone)
    assert Sealer(["first"]).opened(request, tenant_id="acme", model="m").ignored_parameters == (
        "a",
    )
