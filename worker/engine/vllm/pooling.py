"""vLLM's pooling runner: what its model computes, and the requests and results of its inputs."""

from collections.abc import Sequence
from typing import Any

from common.not_none import not_none
from contract.messages import PairForm, PoolingSupport, PoolingTask
from worker.engine.base import EngineRequest, SequenceEnd, SequenceOutput


def pooling_support(
    config: Any, tasks: Sequence[str], *, has_own_pairs: bool, has_given_template: bool
) -> PoolingSupport:
    """Describe a pooling model by its configuration (`ModelConfig`) and the engine's tasks.

    `has_own_pairs` is whether pairs of texts have a form that only the model's code knows. Of other
    models, vLLM renders pairs with a template that the operator gives, never with the model's own.

    Raises ValueError for a model that neither embeds nor classifies whole texts.
    """
    task = config.get_pooling_task(tuple(tasks))
    if task not in {*PoolingTask}:
        raise ValueError(f"runner: of pooling tasks, only {' and '.join(PoolingTask)} are served")
    lowercases = bool((config.encoder_config or {}).get("do_lower_case", False))
    if task == PoolingTask.EMBED:
        return PoolingSupport(
            PoolingTask.EMBED,
            int(config.embedding_size),
            has_dimensions=bool(config.is_matryoshka),
            dimensions=list(config.matryoshka_dimensions or []),
            lowercases=lowercases,
        )
    named, labels = config.hf_config.id2label, int(config.hf_config.num_labels)
    pairs = PairForm.SEPARATED if config.use_sep_token else PairForm.JOINED
    has_pairs = labels == 1 and not has_own_pairs and config.score_type == "cross-encoder"
    return PoolingSupport(
        PoolingTask.CLASSIFY,
        labels,
        labels=[str(named.get(index, index)) for index in range(labels)],
        pairs=pairs if has_pairs else None,
        has_score_template=has_pairs and has_given_template,
        lowercases=lowercases,
    )


def pooling_arguments(request: EngineRequest, *, has_token_types: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's `PoolingParams` for one input."""
    pooling, second = not_none(request.pooling), request.second_text
    types = {"compressed_token_type_ids": second} if has_token_types and second else None
    return {
        "task": pooling.task.value,
        "dimensions": pooling.dimensions,
        "use_activation": pooling.is_activated,
        "extra_kwargs": types,
    }


def pooled_output(output: Any) -> SequenceOutput:
    """Convert the end of an input (`EngineCoreOutput`).

    A result with a number that is not finite is an error of the engine: JSON has no such number.
    """
    numbers = output.pooling_output.float().flatten()
    end = SequenceEnd.STOP if bool(numbers.isfinite().all()) else SequenceEnd.ERROR
    result: bytes = numbers.numpy().astype("<f4").tobytes()
    return SequenceOutput(output.request_id, [], end, cached_tokens=0, pooled=result)
