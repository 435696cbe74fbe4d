"""Responses of pooling models: vectors, labels, scores and ranks as JSON."""

import base64
import math
import struct
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, Final

import msgspec
from typing_extensions import override

from contract.messages import Delta
from gateway.completions.queue.generation import Turn
from gateway.completions.rendering.assembler import Assembler, WholeResponse
from gateway.completions.rendering.completion import Completion
from gateway.dialects.request import PoolingKind, PoolingRequest

ITEMS_AT_ONCE: Final = 8
"""Results that are rendered in one slice: with long vectors they take a millisecond."""
_FLOAT_BYTES: Final = 4
_encode: Final = msgspec.json.Encoder().encode


class PooledAssembler(Assembler):
    """Collects the results of the inputs."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(completion)
        self._pooling = completion.request.pooling or PoolingRequest(kind=PoolingKind.EMBEDDINGS)
        *self._starts, number = accumulate(self._pooling.groups, initial=0)
        self._results = [b""] * number

    @override
    def add_delta(self, prompt_index: int, delta: Delta) -> None:
        self._results[self._starts[prompt_index] + delta.choice] = delta.pooled

    @override
    async def response(self, turn: Turn) -> WholeResponse:
        return WholeResponse(await self._body(turn), self.usage, {})

    async def _body(self, turn: Turn) -> bytes:
        tokens = self.usage.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        usage |= self.completion.cost(self.usage)
        body = self.completion.head()
        if self._pooling.kind is PoolingKind.RERANK:
            units = {"input_tokens": tokens}
            meta = {"api_version": {"version": "2"}, "billed_units": units, "tokens": units}
            results = _ranked(self._pooling, await self._scores(turn))
            return _encode(body | {"results": results, "usage": usage, "meta": meta})
        if self._pooling.kind is PoolingKind.SCORE:
            scores = enumerate(await self._scores(turn))
            data = [{"index": index, "object": "score", "score": each} for index, each in scores]
            return _encode(body | {"data": data, "usage": usage})
        items: list[msgspec.Raw] = []
        for start in range(0, len(self._results), ITEMS_AT_ONCE):
            async with turn():
                for index, result in enumerate(self._results[start : start + ITEMS_AT_ONCE], start):
                    items.append(msgspec.Raw(_encode(_item(self._pooling, index, result))))
        return _encode(body | {"data": items, "usage": usage})

    async def _scores(self, turn: Turn) -> list[float]:
        """Return the score of each document."""
        pooling, scores = self._pooling, list[float]()
        if not pooling.compares_vectors:
            return [_numbers(each)[0] for each in self._results]
        queries = [_numbers(each) for each in self._results[: pooling.queries]]
        documents = self._results[pooling.queries :]
        for start in range(0, len(documents), ITEMS_AT_ONCE):
            async with turn():
                for index, result in enumerate(documents[start : start + ITEMS_AT_ONCE], start):
                    query = queries[index if len(queries) > 1 else 0]
                    scores.append(_similarity(query, _numbers(result)))
        return scores


def _item(pooling: PoolingRequest, index: int, result: bytes) -> dict[str, Any]:
    if pooling.kind is PoolingKind.EMBEDDINGS:
        is_base64 = pooling.is_base64
        vector = base64.b64encode(result).decode() if is_base64 else _numbers(result)
        return {"object": "embedding", "index": index, "embedding": vector}
    probabilities = _numbers(result)
    label = pooling.labels[max(range(len(probabilities)), key=probabilities.__getitem__)]
    return {
        "index": index,
        "label": label,
        "probs": probabilities,
        "num_classes": len(probabilities),
    }


def _ranked(pooling: PoolingRequest, scores: Sequence[float]) -> list[dict[str, Any]]:
    """Return the best documents, the best first; of equal ones, the lower index first."""
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]}
        for index in ranked[: pooling.top_n or len(ranked)]
    ]
    if pooling.documents:
        for each in results:
            each["document"] = {"text": pooling.documents[each["index"]]}
    return results


def _numbers(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // _FLOAT_BYTES}f", packed)


def _similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    size = math.hypot(*one) * math.hypot(*other)
    return sum(map(mul, one, other)) / size if size else 0.0
