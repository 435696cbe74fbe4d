"""Chats over HTTP, with the scripted model or with workers that a test controls."""

import secrets
from typing import Any

import httpx
from redis.asyncio import Redis
from tokenizers import Tokenizer

from contract.messages import ChatFormat, Feature
from contract.queue import JobClaim
from tests.gateway.conftest import serve
from tests.support.fake_worker import FakeWorker, chat_format
from tests.support.stack import CHECKPOINT, MODEL

CHATS = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
FEATURES = [Feature.CHAT, Feature.TOOLS, Feature.REASONING]
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "deepseek_r1"}
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def tool(name: str = "add") -> dict[str, Any]:
    """Return a function as clients describe it."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def chatting(model: str = MODEL, **parameters: Any) -> dict[str, Any]:
    """Return a body with the required parameters and a fixed seed."""
    return {"model": model, "messages": HELLO, "seed": 7, "max_tokens": 8} | parameters


async def chat(client: httpx.AsyncClient, model: str = MODEL, **parameters: Any) -> httpx.Response:
    """Post a body with the required parameters filled in."""
    return await client.post(CHATS, json=chatting(model, **parameters))


async def serve_chats(
    redis: "Redis", *, form: ChatFormat | None = None, **card: Any
) -> tuple[FakeWorker, str]:
    """Announce a chat model; return its worker and its name."""
    name = f"talks-{secrets.token_hex(4)}"
    known: dict[str, Any] = {"features": FEATURES, "chat": form or chat_format(**PARSERS)}
    return await serve(redis, name, **known | card), name


def prompt_of(claim: JobClaim) -> str:
    """Return a job's prompt as text."""
    return str(TOKENIZER.decode(claim.job.prompt_token_ids, skip_special_tokens=False))


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the message of each choice that the chunks of a stream make."""
    reported: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        message = reported.setdefault(choice["index"], {})
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                _add_calls(message.setdefault(name, []), value)
            else:
                message[name] = message.get(name, "") + value
    return reported


def _add_calls(calls: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    for piece in pieces:
        if "id" in piece:
            assert piece["index"] == len(calls)
            calls.append({name: piece[name] for name in ("id", "type", "function")})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
