"""The results of the scripted engine for inputs of a pooling model: a function of their tokens."""

import math
import struct
from random import Random
from typing import Final

from common.not_none import not_none
from contract.messages import PairForm, PoolingSupport, PoolingTask
from worker.engine.base import EngineRequest
from worker.settings import WorkerSettings

_DIMENSIONS: Final = 64
_LABELS: Final = ["negative", "neutral", "positive"]


def scripted_pooling(settings: WorkerSettings) -> PoolingSupport:
    """Return what the engine pretends to compute.

    As with vLLM, the engine argument `convert` makes it a classifier, and `num_labels` in
    `hf_overrides` gives the number of labels.
    """
    arguments = settings.engine_arguments
    if arguments.get("convert") != "classify":
        return PoolingSupport(PoolingTask.EMBED, _DIMENSIONS, has_dimensions=True)
    number = arguments.get("hf_overrides", {}).get("num_labels", len(_LABELS))
    return PoolingSupport(
        PoolingTask.CLASSIFY,
        number,
        labels=_LABELS[:number],
        pairs=PairForm.JOINED if number == 1 else None,
        has_score_template=number == 1 and settings.chat_template is not None,
    )


def pooled(request: EngineRequest, support: PoolingSupport, *, seed: int) -> bytes:
    """Return a vector of length 1, probabilities with the sum 1, or one score."""
    pooling = not_none(request.pooling)
    random = Random(seed)  # noqa: S311 - a function of the tokens
    numbers = [random.random() for _ in range(support.size)]
    if support.task is PoolingTask.EMBED:
        numbers = [2 * number - 1 for number in numbers[: pooling.dimensions]]
        size = math.hypot(*numbers)
    else:
        size = sum(numbers) if support.size > 1 else 1.0
    if pooling.is_activated is False:
        size = 1.0
    return struct.pack(f"<{len(numbers)}f", *(number / size for number in numbers))
