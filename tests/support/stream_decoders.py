"""How clients read server-sent events: their own decoders, or the rules of those that are ported.

A decoder takes a stream in the parts in which it arrives, and returns the data of its events. It
raises an exception where the client would fail.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from openai._streaming import SSEDecoder

CLIENTS: Final = Path(__file__).parents[1] / "clients"

Decoder = Callable[[Sequence[bytes]], list[str]]


def _python(parts: Sequence[bytes]) -> list[str]:
    """Decode as openai-python does."""
    return [event.data for event in SSEDecoder().iter_bytes(iter(parts))]


def _node(parts: Sequence[bytes]) -> list[str]:
    """Decode as openai-node and eventsource-parser, which the AI SDK uses, do."""
    program = CLIENTS / "decode.mjs"
    given = json.dumps([part.decode() for part in parts])
    result = subprocess.run(
        ["node", program], input=given, capture_output=True, check=True, text=True
    )
    openai, parser = json.loads(result.stdout)
    assert openai == parser
    return list(openai)


def _lines(parts: Iterable[bytes]) -> list[str]:
    return b"".join(parts).decode().split("\n")


def _standard(parts: Sequence[bytes]) -> list[str]:
    """Decode by the HTML standard.

    As browsers, eventsource-stream 0.2 (`EventBuilder::dispatch`, of async-openai), openai-go from
    3.43 (`ssestream.go`, `eventStreamDecoder.Next`), and httpx-sse.
    """
    return [data for data in _dispatched(parts) if data]


def _go_before_3_43(parts: Sequence[bytes]) -> list[str]:
    """Decode as the same function of openai-go before 3.43: each empty line ends an event."""
    return _dispatched(parts)


def _dispatched(parts: Sequence[bytes]) -> list[str]:
    events: list[str] = []
    data: list[str] = []
    for line in _lines(parts):
        name, _, value = line.partition(":")
        if not line:
            events.append("\n".join(data))
            data = []
        elif name == "data":
            data.append(value.removeprefix(" "))
    # The end of the text is no empty line.
    return events[:-1] if parts[-1].endswith(b"\n") else events


def _each_line(parts: Sequence[bytes]) -> list[str]:
    """Decode as the load generators of SGLang (`bench_serving.py`) and Ray (`llmperf`) do."""
    lines = [line.strip() for line in _lines(parts)]
    return [line.removeprefix("data: ") for line in lines if line]


def _vllm(parts: Sequence[bytes]) -> list[str]:
    """Decode as `vllm bench serve` does (`endpoint_request_func.py`, `StreamedResponseHandler`)."""
    messages: list[str] = []
    buffer = ""
    for part in parts:
        *whole, buffer = (buffer + part.decode()).split("\n\n")
        messages += [each.strip() for each in whole if each.strip()]
        content = buffer.removeprefix("data: ").strip()
        if buffer.startswith("data: ") and (content == "[DONE]" or _is_json(content)):
            messages.append(buffer.strip())
            buffer = ""
    return [each.removeprefix("data: ") for each in messages if not each.startswith(":")]


def _guidellm(parts: Sequence[bytes]) -> list[str]:
    """Decode as GuideLLM does (`request_handlers.py`, `extract_line_data`)."""
    lines = [line.strip() for line in _lines(parts)]
    return [line[len("data:") :].strip() for line in lines if line.startswith("data:")]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_HAS_NODE = shutil.which("node") and (CLIENTS / "node_modules" / "openai").is_dir()
READ_IDS: Final[dict[str, Decoder]] = {
    "openai-python": _python,
    **({"openai-node": _node} if _HAS_NODE else {}),
    "standard": _standard,
    "openai-go before 3.43": _go_before_3_43,
    "GuideLLM": _guidellm,
}
"""Decoders of clients that accept lines with ids."""
DECODERS: Final[dict[str, Decoder]] = {**READ_IDS, "each line": _each_line, "vLLM": _vllm}
