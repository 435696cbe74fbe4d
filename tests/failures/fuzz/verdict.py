"""The forms that a response may have, whatever the request."""

import json
import re
from typing import Any

import httpx

from tests.failures.fuzz.bodies import Case

REFUSALS = frozenset({400, 404, 413, 422, 429})
OVERLOADED = 503
DONE = "data: [DONE]"
CONTRADICTION = "left no next token."
"""A stream may fail only if its words were forbidden and its structure needs them."""

REASONS = frozenset({"stop", "length", "tool_calls", "function_call"})

_EVENT_ID = re.compile(r"\nid: (?:chat)?cmpl-")

_KEYS: dict[str, set[str]] = {
    "llamacpp": {"code", "message", "type"},
    "other": {"message", "type", "param", "code"},
}
_OPTIONAL = {"n_prompt_tokens", "n_ctx", "availability"}


def complaint(case: Case, response: httpx.Response) -> str:
    """Return the defect of a response; empty if it is a sound completion, stream or refusal."""
    try:
        if response.status_code == 200:
            return _of_success(response)
        if response.status_code == OVERLOADED and "retry-after" not in response.headers:
            return "503 without retry-after"
        if response.status_code not in {*REFUSALS, OVERLOADED}:
            return f"status {response.status_code}"
        return _of_error(case, response)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return f"{error!r} in {response.text[:500]}"


def _of_success(response: httpx.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        return _of_stream(response.text)
    answer = response.json()
    return _of_status(answer) if "status" in answer else _of_completion(answer)


def _of_status(answer: dict[str, Any]) -> str:
    is_started = answer["background"] is True and answer["status"] in ("queued", "in_progress")
    return "" if is_started else f"status {answer}"


def _of_stream(text: str) -> str:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    events = [_EVENT_ID.split(block)[0] for block in blocks]
    if events[-1] != DONE or not all(event.startswith("data: ") for event in events):
        return f"no sound stream: {text[-500:]}"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        return _of_failure(chunks)
    ended = [choice["index"] for c in chunks for choice in c["choices"] if choice["finish_reason"]]
    seen = {choice["index"] for chunk in chunks for choice in chunk["choices"]}
    if sorted(ended) != sorted(seen) or not ended:
        return f"ended {ended} of {seen}"
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return _of_usage(usages[-1]) if usages else "no usage"


def _of_failure(chunks: list[dict[str, Any]]) -> str:
    """Return the defect of a failed stream; empty if the request was impossible to fulfil."""
    *before, last = chunks
    is_last = not any("error" in chunk for chunk in before)
    if is_last and last["error"]["message"].endswith(CONTRADICTION):
        return ""
    return f"failed after it began: {last}"


def _of_completion(answer: dict[str, Any]) -> str:
    choices = answer["choices"]
    if [choice["index"] for choice in choices] != list(range(len(choices))) or not choices:
        return "indices of choices"
    if any(choice["finish_reason"] not in REASONS for choice in choices):
        return f"finish reason in {choices}"
    if any(not _has_text(choice) or "logprobs" not in choice for choice in choices):
        return f"choice without text or logprobs: {choices}"
    return _of_usage(answer["usage"])


def _has_text(choice: dict[str, Any]) -> bool:
    if "message" not in choice:
        return isinstance(choice["text"], str)
    message = choice["message"]
    is_calling = bool(message.get("tool_calls") or message.get("function_call"))
    return isinstance(message["content"], str) or is_calling


def _of_usage(usage: dict[str, Any]) -> str:
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    return "" if usage["total_tokens"] == total else f"usage {usage}"


def _of_error(case: Case, response: httpx.Response) -> str:
    error = response.json()["error"]
    style = "llamacpp" if (case.dialect or "").startswith("llamacpp") else "other"
    if set(error) - _OPTIONAL != _KEYS[style]:
        return f"envelope {error}"
    numeric = style == "llamacpp" or case.dialect == "vllm"
    if isinstance(error["code"], int) is not numeric:
        return f"code {error['code']!r}"
    if not isinstance(error["message"], str) or not error["message"].endswith("."):
        return f"message {error['message']!r}"
    if (response.status_code == 422) > (case.dialect == "mistralrs"):
        return "422 outside mistralrs"
    return ""
