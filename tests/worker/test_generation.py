"""One job: choices, ranking, replication, gathering, log-probabilities and final counts."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.messages import Delta, GenerationJob
from contract.outcomes import FinishReason
from contract.queue import Claim
from contract.sampling import SamplingSpec
from tests.worker.conftest import make_job
from worker.checks import check_job
from worker.engine.base import (
    EngineInfo,
    InvalidRequestError,
    SequenceEnd,
    SequenceOutput,
    TokenScores,
)
from worker.generation import GATHERED_TOKENS, Generation
from worker.logprobs import LOWEST_LOGPROB, TokenTexts
from worker.replies import Outbox

GREEDY = SamplingSpec(seed=1, temperature=0.0)


@pytest.fixture(scope="session")
def texts(tokenizer: Tokenizer) -> TokenTexts:
    return TokenTexts(tokenizer)


@pytest.fixture
def start(tokenizer: Tokenizer, texts: TokenTexts) -> Any:
    def start(**changes: Any) -> tuple[Generation, Outbox]:
        outbox = Outbox("g1")
        claim = Claim(make_job(**changes), attempt=2)
        return Generation(claim, outbox, tokenizer=tokenizer, texts=texts), outbox

    return start


def feed(
    generation: Generation,
    index: int,
    token_ids: list[int],
    *,
    end: SequenceEnd | None = None,
    logprobs: list[TokenScores] | None = None,
    **more: Any,
) -> bool:
    sequence_id = generation.sequences[index].id
    return generation.receive(
        SequenceOutput(sequence_id, token_ids, end, logprobs=logprobs, **more)
    )


def text_of(deltas: list[Delta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def test_each_choice_is_a_sequence_with_its_own_seed(start: Any) -> None:
    generation, _ = start(n=3, seed=2**63 - 2)
    requests = generation.requests()
    assert [request.seed for request in requests] == [2**63 - 2, 2**63 - 1, 0]
    assert len({request.id for request in requests}) == 3


def test_negative_seed_becomes_one_that_the_engine_takes_for_a_seed(start: Any) -> None:
    generation, _ = start(seed=-1)
    assert generation.requests()[0].seed == 2**63 - 1


def test_choices_stream_independently_and_count_together(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(n=2)
    one, two = tokenizer.encode(" one two").ids[:2]
    feed(generation, 0, [one], cached_tokens=1)
    feed(generation, 1, [two], cached_tokens=2)
    assert [(delta.choice, delta.token_ids) for delta in outbox.deltas] == [(0, [one]), (1, [two])]
    assert feed(generation, 0, [one], end=SequenceEnd.LENGTH)
    assert not outbox.finished
    feed(generation, 1, [two, two], end=SequenceEnd.LENGTH)
    (finished,) = outbox.finished
    assert (finished.prompt_tokens, finished.completion_tokens) == (3, 5)
    assert finished.cached_tokens == 1, "of the first sequence only"
    assert finished.attempt == 2
    assert outbox.reports == [generation.report]


def test_greedy_choices_are_one_sequence_told_n_times(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(n=3, best_of=5, sampling=GREEDY)
    assert len(generation.requests()) == 1
    ids = tokenizer.encode(" one two").ids
    for token_id in ids:
        feed(generation, 0, [token_id])
    feed(generation, 0, ids[:1], end=SequenceEnd.LENGTH)
    for choice in range(3):
        assert text_of(outbox.deltas, choice) == tokenizer.decode([*ids, ids[0]])
    assert outbox.finished[0].completion_tokens == 3 * (len(ids) + 1)
    assert generation.completion_tokens == 3 * (len(ids) + 1)


def test_best_of_ranks_by_mean_logprob_and_counts_all(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(n=2, best_of=4, max_tokens=3)
    token = tokenizer.encode(" one").ids[0]
    assert {request.logprobs for request in generation.requests()} == {0}
    scores = [[-1.0, -1.0], [-0.5], [-9.0], [-1.0]]
    for index, logprobs in enumerate(scores):
        for position, logprob in enumerate(logprobs):
            is_last = position == len(logprobs) - 1
            end = SequenceEnd.LENGTH if is_last else None
            feed(generation, index, [token], end=end, logprobs=[[(token, logprob)]])
            if index < 3:
                assert not outbox.deltas, "nothing is told before all have ended"
    assert [(delta.choice, len(delta.token_ids)) for delta in outbox.deltas] == [(0, 1), (1, 2)]
    assert all(delta.logprobs is None for delta in outbox.deltas)
    assert outbox.finished[0].completion_tokens == 5


def test_max_tokens_zero_reads_the_prompt_and_drops_the_token(start: Any) -> None:
    generation, outbox = start(max_tokens=0, n=2, score_prompt=True, logprobs=1)
    (request,) = generation.requests()
    assert (request.max_tokens, request.logprobs, request.prompt_logprobs) == (1, None, 1)
    scores: list[TokenScores] = [[(301, -1.5), (7, -0.5)], [(302, float("-inf"))]]
    feed(generation, 0, [400], end=SequenceEnd.LENGTH, prompt_logprobs=scores, cached_tokens=0)
    assert [(d.choice, d.text, d.token_ids, d.finish_reason) for d in outbox.deltas] == [
        (0, "", [], FinishReason.LENGTH),
        (1, "", [], FinishReason.LENGTH),
    ]
    assert outbox.finished[0].completion_tokens == 0
    first, second, third = outbox.prompts[0].logprobs
    assert (first.logprob, first.top, first.offset) == (None, None, 0)
    assert second.logprob == -1.5
    assert [logprob for _, logprob in second.top or []] == [-0.5, -1.5]
    assert third.logprob == LOWEST_LOGPROB


def test_prompt_offsets_point_into_the_prompt(start: Any, tokenizer: Tokenizer) -> None:
    text = "naïve 日本 words"
    ids = tokenizer.encode(text).ids
    generation, outbox = start(prompt_token_ids=ids, max_tokens=1, score_prompt=True, logprobs=0)
    scores = [[(token_id, -1.0)] for token_id in ids[1:]]
    feed(generation, 0, [400], end=SequenceEnd.LENGTH, prompt_logprobs=scores)
    entries = outbox.prompts[0].logprobs
    assert "".join(entry.token for entry in entries) == text
    for entry in entries:
        assert text[entry.offset :].startswith(entry.token)


def test_stop_string_ends_the_sequence_before_the_engine_does(
    start: Any, tokenizer: Tokenizer
) -> None:
    generation, outbox = start(stop=["wo th"], logprobs=0)
    ids = tokenizer.encode(" one two three").ids
    has_ended = False
    fed = 0
    while not has_ended:
        has_ended = feed(generation, 0, [ids[fed]], logprobs=[[(ids[fed], -1.0)]])
        fed += 1
    assert text_of(outbox.deltas) == " one t"
    last = outbox.deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "wo th")
    assert generation.is_done
    entries = [entry for delta in outbox.deltas for entry in delta.logprobs or []]
    assert len(entries) == fed == outbox.finished[0].completion_tokens
    assert all(entry.offset <= len(" one t") for entry in entries)


def test_held_back_text_comes_with_the_end(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(stop=["one thousand"])
    ids = tokenizer.encode(" one").ids
    for token_id in ids[:-1]:
        feed(generation, 0, [token_id])
    feed(generation, 0, ids[-1:], end=SequenceEnd.LENGTH)
    assert text_of(outbox.deltas) == " one"
    assert [each for delta in outbox.deltas for each in delta.token_ids] == ids


def test_end_of_text_token_is_counted_but_not_shown(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(logprobs=0)
    word, eos = tokenizer.encode(" one").ids[0], tokenizer.encode("</s>").ids[0]
    feed(generation, 0, [word], logprobs=[[(word, -1.0)]])
    feed(generation, 0, [eos], end=SequenceEnd.STOP, logprobs=[[(eos, -2.0)]])
    assert text_of(outbox.deltas) == tokenizer.decode([word])
    assert outbox.finished[0].completion_tokens == 2
    last = outbox.deltas[-1]
    assert (last.finish_reason, last.stop_reason, last.token_ids) == (
        FinishReason.STOP,
        None,
        [eos],
    )
    assert last.logprobs is not None
    assert (last.logprobs[0].token, last.logprobs[0].offset) == (
        "</s>",
        len(tokenizer.decode([word])),
    )


def test_stop_token_is_the_stop_reason(start: Any) -> None:
    generation, outbox = start()
    feed(generation, 0, [400], end=SequenceEnd.STOP, stop_token_id=400)
    assert outbox.deltas[-1].stop_reason == 400


def test_job_that_nobody_reads_along_is_told_in_large_pieces(start: Any) -> None:
    generation, outbox = start(stream=False, max_tokens=1000)
    for _ in range(2 * GATHERED_TOKENS + 5):
        feed(generation, 0, [400])
    assert [len(delta.token_ids) for delta in outbox.deltas] == [GATHERED_TOKENS] * 2
    feed(generation, 0, [400], end=SequenceEnd.LENGTH)
    assert [len(delta.token_ids) for delta in outbox.deltas] == [GATHERED_TOKENS] * 2 + [6]


def test_text_gathers_until_it_is_due_but_the_first_and_the_last_never_wait(
    start: Any, tokenizer: Tokenizer
) -> None:
    generation, outbox = start(max_tokens=4)
    ids = tokenizer.encode("one two three four", add_special_tokens=False).ids[:4]
    sequence_id = generation.sequences[0].id
    told = []
    for position, token_id in enumerate(ids):
        end = SequenceEnd.LENGTH if position == 3 else None
        generation.receive(SequenceOutput(sequence_id, [token_id], end), is_due=False)
        told.append(len(outbox.deltas))
    assert told == [1, 1, 1, 2]
    assert [delta.token_ids for delta in outbox.deltas] == [ids[:1], ids[1:]]
    assert text_of(outbox.deltas) == tokenizer.decode(ids)


def test_token_without_text_waits_for_its_character(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(logprobs=0)
    ids = tokenizer.encode("日").ids
    for token_id in ids:
        feed(generation, 0, [token_id], logprobs=[[(token_id, -1.0)]])
    (delta,) = outbox.deltas
    assert (delta.text, delta.token_ids) == ("日", ids)
    assert [entry.offset for entry in delta.logprobs or []] == [0] * len(ids)


def test_alternatives_of_equal_text_keep_the_likelier(start: Any, tokenizer: Tokenizer) -> None:
    half_a, half_b = tokenizer.encode("日").ids[0], tokenizer.encode("語").ids[-1]
    word = tokenizer.encode(" one").ids[0]
    generation, outbox = start(logprobs=3)
    scores = [(word, -3.0), (half_a, -1.0), (half_b, -2.0), (word, -3.0)]
    feed(generation, 0, [word], logprobs=[scores])
    (entry,) = outbox.deltas[0].logprobs or []
    assert entry.top == [("\ufffd", -1.0), (tokenizer.decode([word]), -3.0)]


INFO = EngineInfo(
    name="test",
    context_window=100,
    vocabulary_size=2048,
    max_sequences=8,
    kv_cache_tokens=1000,
    tokenizer_json=b"",
    bos_token_id=None,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": []}, "must not be empty"),
        ({"prompt_token_ids": [5, 2048]}, "between 0 and 2047. Given: 2048"),
        ({"prompt_token_ids": [-1]}, "between 0 and 2047. Given: -1"),
        ({"prompt_token_ids": [1] * 90, "max_tokens": 11}, "at most 100 tokens. Given: 90 [+] 11"),
        ({"max_tokens": -1}, "Given: 3 [+] -1"),
        ({"best_of": 0}, "best_of must be at least n"),
        ({"stop": ["a", ""]}, "stop must not be an empty string"),
        ({"sampling": SamplingSpec(seed=1, logit_bias={3: float("nan")})}, "logit_bias"),
        ({"sampling": SamplingSpec(seed=1, logit_bias={2048: 1.0})}, "logit_bias"),
        ({"sampling": SamplingSpec(seed=1, temperature=float("nan"))}, "temperature"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_job_that_no_engine_could_take_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_job(make_job(**changes), INFO)


def test_job_that_just_fits_is_taken() -> None:
    job: GenerationJob = make_job(prompt_token_ids=[0] * 90, max_tokens=10)
    check_job(job, INFO)
    assert job.best_of == 1
