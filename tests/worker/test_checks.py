"""The worker's last check: what no engine accepts is refused by name, bound and value."""

import math
from dataclasses import replace
from typing import Any

import pytest

from contract.messages import (
    Feature,
    GenerationJob,
    Parsing,
    Pooling,
    PoolingSupport,
    PoolingTask,
)
from contract.sampling import (
    DEFAULT_SAMPLERS,
    Dry,
    Mirostat,
    RepetitionDetection,
    Sampler,
    SamplerChain,
    SamplingSpec,
    Xtc,
)
from tests.support.cases import all_cases
from tests.worker.conftest import make_job
from worker.engine.base import EngineInfo, InvalidRequestError
from worker.execution.checks import check_job

INFO = EngineInfo(
    name="test",
    context_window=100,
    vocabulary_size=2048,
    max_sequences=8,
    kv_cache_tokens=1000,
    tokenizer_json=b"",
    bos_token_id=None,
    eos_token_ids=[1, 2],
    features=list(Feature),
    image_token="<image>",
    max_images=2,
)
NAN = float("nan")
POOLING = replace(INFO, pooling=PoolingSupport(PoolingTask.EMBED, 8))


def inputs(*lengths: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of a job for a pooling model."""
    task = changes.pop("task", PoolingTask.EMBED)
    given = {"second_texts": changes.pop("second_texts", [])}
    given["dimensions"] = changes.pop("dimensions", None)
    number = {"n": len(lengths), "best_of": len(lengths), "max_tokens": 0}
    return number | {"pooling": Pooling(task, list(lengths), **given)} | changes


def spec(**changes: Any) -> dict[str, Any]:
    return {"sampling": SamplingSpec(**{"seed": 1, **changes})}


def chain(**changes: Any) -> dict[str, Any]:
    return spec(chain=SamplerChain(order=changes.pop("order", []), **changes))


def dry(**changes: Any) -> dict[str, Any]:
    fields = {"multiplier": 0.8, "base": 1.75, "allowed_length": 2, "last_n": -1, "breakers": []}
    return chain(dry=Dry(**{**fields, **changes}))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_token_ids": []}, "must not be empty"),
    ({"prompt_token_ids": [5, 2048]}, "between 0 and 2047. Given: 2048"),
    ({"prompt_token_ids": [2**32 - 1]}, "between 0 and 2047. Given: 4294967295"),
    ({"prompt_token_ids": [0xD800, 7]}, "between 0 and 2047. Given: 55296"),
    ({"prompt_token_ids": [1] * 90, "max_tokens": 11}, "at most 100 tokens. Given: 90 + 11"),
    ({"max_tokens": -1}, "Given: 3 + -1"),
    ({"max_tokens": 2**80}, "at most 100 tokens"),
    ({"max_predict_ms": -1}, "t_max_predict_ms"),
    ({"best_of": 0}, "best_of must be at least n"),
    ({"best_of": 129}, "best_of"),
    ({"n": 129}, "n must be between"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": ["a", ""]}, "stop must not be an empty string"),
    ({"stop": ["a"] * 65}, "stop must have at most 64 entries. Given: 65"),
    ({"stop": ["a" * 513]}, "stop must have at most 512 characters. Given: 513"),
    ({"parsing": Parsing(tools=[{}] * 129)}, "tools must have at most 128 entries. Given: 129"),
    ({"parsing": Parsing(opening_tokens=4)}, "opening_tokens must be between 0 and 3. Given: 4"),
    ({"parsing": Parsing(opening_tokens=-1)}, "opening_tokens must be between"),
    (spec(thinking_budget=-1), "thinking_budget must be between 0 and 2147483647. Given: -1"),
    (spec(thinking_budget=2**31), "thinking_budget"),
    ({"grammar": "a" * 1_000_001}, "grammar must have at most"),
    ({"images": [b""] * 3}, "images must have at most 2 entries. Given: 3"),
    ({"images": [b""], "score_prompt": True}, "logprobs of the prompt"),
    (spec(temperature=NAN), "temperature"),
    (spec(temperature=math.inf), "temperature"),
    (spec(seed=2**63), "seed"),
    (spec(min_tokens=-1), "min_tokens"),
    (spec(min_tokens=2**31), "min_tokens"),
    (spec(logit_bias={3: NAN}), "logit_bias"),
    (spec(logit_bias={3: math.inf}), "logit_bias"),
    (spec(logit_bias={3: -100.5}), "logit_bias"),
    (spec(logit_bias={2048: 1.0}), "logit_bias"),
    (spec(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias must have at most 1024"),
    (spec(stop_token_ids=[2048]), "stop_token_ids"),
    (spec(stop_token_ids=[-1]), "stop_token_ids"),
    (spec(stop_token_ids=[3] * 129), "stop_token_ids must have at most 128"),
    (spec(stop_token_ids=list(range(3, 130)), min_tokens=1), "at most 128 if min_tokens"),
    (spec(allowed_token_ids=[2048]), "allowed_token_ids"),
    (spec(allowed_token_ids=[3] * 1025), "allowed_token_ids must have at most 1024"),
    (
        spec(allowed_token_ids=[5], logit_bias={5: -math.inf}),
        "allow at least one token to begin with. Given: allowed_token_ids [5], logit_bias [5].",
    ),
    (spec(allowed_token_ids=[1, 2], min_tokens=1), "must allow at least one token"),
    (
        spec(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1),
        "must allow at least one token",
    ),
    (spec(bad_words=[""]), "bad_words must not be empty"),
    (spec(bad_words=[" \n"]), "bad_words must not be empty"),
    (spec(bad_words=["a"] * 129), "bad_words must have at most 128"),
    (spec(bad_words=["a" * 129]), "bad_words must have at most 128 characters"),
    (spec(repetition_detection=RepetitionDetection(4097, 1, 2)), "max_pattern_size"),
    (spec(repetition_detection=RepetitionDetection(2, -1, 2)), "min_pattern_size"),
    (spec(repetition_detection=RepetitionDetection(2, 1, 2**40)), "min_count"),
    (chain(order=[Sampler.TOP_K] * 33), "samplers must have at most 32"),
    (chain(penalty_last_n=-2), "penalty_last_n"),
    (chain(typical_p=NAN), "typical_p"),
    (chain(top_n_sigma=1e9), "top_n_sigma"),
    (chain(min_keep=-1), "min_keep"),
    (chain(dynatemp_range=NAN), "dynatemp_range"),
    (chain(dynatemp_exponent=0.0), "dynatemp_exponent"),
    (chain(xtc=Xtc(1.5, 0.1)), "xtc_probability"),
    (chain(xtc=Xtc(0.5, NAN)), "xtc_threshold"),
    (chain(mirostat=Mirostat(3, 5.0, 0.1)), "mirostat must"),
    (chain(mirostat=Mirostat(2, NAN, 0.1)), "mirostat_tau"),
    (chain(mirostat=Mirostat(2, 5.0, -0.1)), "mirostat_eta"),
    (dry(multiplier=NAN), "dry_multiplier"),
    (dry(base=-1.0), "dry_base"),
    (dry(allowed_length=-1), "dry_allowed_length"),
    (dry(last_n=-2), "dry_penalty_last_n"),
    (dry(breakers=["a"] * 17), "dry_sequence_breakers must have at most 16"),
    (dry(breakers=["a" * 41]), "dry_sequence_breakers must have at most 40"),
]


@all_cases(("changes", "message"), REFUSED, ids=lambda value: str(value)[-40:])
def test_job_that_no_engine_accepts_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_job(make_job(**changes), INFO)
    plain = str(refused.value).replace("'", "")
    assert message in plain
    assert (refused.value.param or "") in plain
    assert len(plain) < 200


TAKEN: dict[str, dict[str, Any]] = {
    "just fits": {"prompt_token_ids": [0] * 90, "max_tokens": 10},
    "nothing but the prompt": {"max_tokens": 0},
    "the highest token": {"prompt_token_ids": [2047]},
    "64 stops": {"stop": ["a" * 512] * 64},
    "bans": spec(logit_bias={5: -math.inf, 6: -100.0, 7: 100.0}, allowed_token_ids=[5, 6]),
    "min_tokens above max_tokens": spec(min_tokens=2**31 - 1),
    "the end of text only": spec(allowed_token_ids=[1]),
    "every stop token": spec(stop_token_ids=list(range(3, 129)), min_tokens=1),
    "bad words": spec(bad_words=["a b", "日"] * 64),
    "repetition": spec(repetition_detection=RepetitionDetection(20, 0, 2)),
    "chain": chain(
        order=list(DEFAULT_SAMPLERS),
        xtc=Xtc(1.0, 1.0),
        mirostat=Mirostat(1, 5.0, 0.1),
        dry=Dry(0.8, 1.75, 2, -1, ["\n"]),
    ),
    "images": {"images": [b"", b""]},
    "grammar": {"grammar": 'start: "a"'},
    "chat": {"parsing": Parsing(tools=[{}] * 128, finds_reasoning=True, opening_tokens=3)},
    "no reasoning": spec(thinking_budget=0),
}


@all_cases("name", TAKEN)
def test_job_within_all_bounds_is_accepted(name: str) -> None:
    job: GenerationJob = make_job(**TAKEN[name])
    check_job(job, INFO)
    assert job.best_of == 1


@all_cases(
    ("changes", "feature"),
    [
        (chain(), "sampler_chain"),
        ({"grammar": "start: /a/"}, "structure"),
        ({"images": [b""]}, "images"),
        ({"parsing": Parsing()}, "chat"),
        (spec(thinking_budget=5), "thinking_budget"),
    ],
    ids=["chain", "grammar", "images", "chat", "budget"],
)
def test_feature_that_the_engine_lacks_is_refused(changes: dict[str, Any], feature: str) -> None:
    bare = EngineInfo(
        name="bare",
        context_window=100,
        vocabulary_size=2048,
        max_sequences=8,
        kv_cache_tokens=1000,
        tokenizer_json=b"",
        bos_token_id=None,
    )
    check_job(make_job(), bare)
    with pytest.raises(InvalidRequestError, match=f"does not support {feature}"):
        check_job(make_job(**changes), bare)


@all_cases(
    ("parsing", "feature"),
    [(Parsing(tools=[{}]), "tools"), (Parsing(finds_reasoning=True), "reasoning")],
    ids=["tools", "reasoning"],
)
def test_chat_model_needs_no_parsers(parsing: Parsing, feature: str) -> None:
    plain = replace(INFO, features=[Feature.CHAT])
    check_job(make_job(parsing=Parsing()), plain)
    with pytest.raises(InvalidRequestError, match=f"does not support {feature}"):
        check_job(make_job(parsing=parsing), plain)


def test_small_vocabulary_cannot_be_forbidden_completely() -> None:
    tiny = EngineInfo(
        name="tiny",
        context_window=100,
        vocabulary_size=400,
        max_sequences=8,
        kv_cache_tokens=1000,
        tokenizer_json=b"",
        bos_token_id=None,
        eos_token_ids=[1],
    )
    allowed = dict.fromkeys(range(399), -math.inf)
    check_job(make_job(**spec(logit_bias=allowed)), tiny)
    with pytest.raises(InvalidRequestError, match="must allow at least one token"):
        check_job(make_job(**spec(logit_bias={**allowed, 399: -math.inf})), tiny)


def test_inputs_of_a_pooling_model_are_accepted() -> None:
    # Each input fits into the context window, and may fill it.
    check_job(make_job(prompt_token_ids=[5] * 150, **inputs(100, 50, second_texts=[3, 4])), POOLING)


@pytest.mark.parametrize(
    ("info", "changes", "words"),
    [
        (INFO, inputs(3), "generates text"),
        (POOLING, {}, "generates no text"),
        (POOLING, inputs(3, task=PoolingTask.CLASSIFY), "cannot classify"),
        (POOLING, inputs(2), "contradict"),
        (POOLING, inputs(3, 0), "contradict"),
        (POOLING, inputs(), "contradict"),
        (POOLING, inputs(1, 2, n=1), "contradict"),
        (POOLING, inputs(1, 2, second_texts=[1]), "contradict"),
        (POOLING, inputs(3, max_tokens=1), "contradict"),
        (POOLING, inputs(3, dimensions=9), "between 1 and 8"),
        (POOLING, inputs(101, prompt_token_ids=[5] * 101), "at most 100 tokens. Given: 101"),
    ],
)
def test_inputs_that_no_engine_pools_are_refused(
    info: EngineInfo, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        check_job(make_job(**({"prompt_token_ids": [5, 6, 7]} | changes)), info)
