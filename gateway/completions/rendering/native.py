"""llama.cpp's own form of a completion: one result object for each choice.

A stream consists of partial results and one final result of each choice, without `[DONE]`. A whole
response is the final result of its only choice, or a list of final results.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from typing_extensions import override

from common.not_none import not_none
from contract.messages import Delta, JobFinished, decode_logprobs
from contract.outcomes import FinishReason
from gateway.completions.rendering.choice import Choice
from gateway.completions.rendering.completion import Completion
from gateway.completions.rendering.logprobs import ScoredToken, scored_tokens
from gateway.completions.rendering.timings import job_timings
from gateway.dialects.request import GenerationRequest

NO_SLOT: Final = -1
"""llama.cpp's id of no particular slot: requests here have no slots."""


class NativeChoice(Choice):
    """Turns the deltas of one choice into results."""

    def __init__(self, completion: Completion, index: int) -> None:
        self._completion = completion
        self._request: GenerationRequest = completion.request
        self._index = index
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._probabilities: list[dict[str, Any]] = []
        self._predicted = 0
        self._has_new_line = False
        self._end: Delta | None = None
        self._finished: JobFinished | None = None

    @override
    def take_finished(self, finished: JobFinished) -> None:
        self._finished = finished

    @override
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the partial result of a delta, if it has any token or text."""
        self._count(delta)
        if not (delta.text or delta.token_ids):
            return []
        chunk = self._partial(delta.text, delta.token_ids)
        if probabilities := self._scored(delta):
            chunk["completion_probabilities"] = probabilities
        return [chunk]

    @override
    def without_tokens(self) -> dict[str, Any]:
        return self._partial("", [])

    @override
    def failed(self) -> dict[str, Any]:
        return self._partial("", [])

    @override
    def add(self, delta: Delta) -> None:
        self._count(delta)
        self._texts.append(delta.text)
        if self._request.return_token_ids:
            self._token_ids += delta.token_ids
        self._probabilities += self._scored(delta)

    @override
    def whole(self) -> dict[str, Any]:
        """Return the final result; in a stream, without the text and the tokens sent before."""
        finished, end = not_none(self._finished), not_none(self._end)
        stop_type = self._stop_type(end)
        used = finished.prompt_tokens + self._predicted
        window = self._completion.generation_settings.get("n_ctx", used + 1)
        body: dict[str, Any] = {
            "index": self._index,
            "content": "".join(self._texts),
            "tokens": self._token_ids,
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._completion.model,
            "tokens_predicted": self._predicted,
            "tokens_evaluated": finished.prompt_tokens,
            "generation_settings": self._completion.generation_settings,
            "prompt": self._completion.prompt_texts[self._index // self._request.n],
            "has_new_line": self._has_new_line,
            "truncated": stop_type == "limit" and used >= window,
            "stop_type": stop_type,
            "stopping_word": end.stop_reason if stop_type == "word" else "",
            "tokens_cached": finished.cached_tokens,
            "timings": job_timings(finished, completion_tokens=self._predicted),
        }
        if self._probabilities:
            body["completion_probabilities"] = self._probabilities
        fields = self._request.response_fields
        return {path: value for path in fields for value in _at(body, path)} if fields else body

    def _partial(self, content: str, token_ids: list[int]) -> dict[str, Any]:
        prompt = self._completion.prompt_token_ids[self._index // self._request.n]
        return {
            "index": self._index,
            "content": content,
            "tokens": list(token_ids),
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": self._predicted,
            "tokens_evaluated": len(prompt),
        }

    def _count(self, delta: Delta) -> None:
        self._predicted += len(delta.token_ids)
        self._has_new_line = self._has_new_line or "\n" in delta.text
        if delta.finish_reason is not None:
            self._end = delta

    def _scored(self, delta: Delta) -> list[dict[str, Any]]:
        count = self._request.logprobs
        if count is None:
            return []
        logprobs = decode_logprobs(delta.logprobs)
        scored = scored_tokens(zip(delta.token_ids, logprobs, strict=False), alternatives=count)
        is_post = self._request.reports_probabilities
        entries = zip(delta.token_ids, scored, logprobs, strict=True)
        return [
            _scored(token_id, token, entry.top_ids, is_post=is_post)
            for token_id, token, entry in entries
        ]

    def _stop_type(self, end: Delta) -> str:
        if end.finish_reason is FinishReason.LENGTH:
            return "limit"
        if isinstance(end.stop_reason, str):
            # The engine gives its own reason for a repetitive choice.
            return "word" if end.stop_reason in self._request.stop else "limit"
        return "eos"


def _at(body: Any, path: str) -> list[Any]:
    """Return the value at a path of names, or nothing if there is none."""
    for name in path.split("/"):
        if not isinstance(body, dict) or name not in body:
            return []
        body = body[name]
    return [body]


def _scored(
    token_id: int, token: ScoredToken, top_ids: Sequence[int], *, is_post: bool
) -> dict[str, Any]:
    """Return a token with its log-probability, or with its probability if `is_post`.

    Tokens that the samplers removed have no probability and are left out.
    """
    name = "prob" if is_post else "logprob"
    alternatives: list[dict[str, Any]] = [
        {"token": each.token, "bytes": each.bytes, name: _value(each.logprob, is_post=is_post)}
        for each in token.top_logprobs
    ]
    for each, id_ in zip(alternatives, top_ids, strict=False):
        each["id"] = id_
    return {
        "id": token_id,
        "token": token.token,
        "bytes": token.bytes,
        name: _value(token.logprob, is_post=is_post),
        "top_probs" if is_post else "top_logprobs": [
            each for each in alternatives if not is_post or each[name] > 0.0
        ],
    }


def _value(logprob: float, *, is_post: bool) -> float:
    return math.exp(logprob) if is_post else logprob
