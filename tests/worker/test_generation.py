"""One job: choices, ranking, replication, gathering, log-probabilities and final counts."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.messages import Delta, Ranking, decode_logprobs
from contract.outcomes import FinishReason
from contract.queue import JobClaim
from contract.sampling import SamplingSpec
from tests.worker.conftest import make_job
from worker.engine.base import SequenceEnd, SequenceOutput, TokenScores
from worker.execution.logprobs import LOWEST_LOGPROB, TokenTexts
from worker.execution.running_job import GATHERED_TOKENS, RunningJob
from worker.queue.replies import ReplyOutbox

GREEDY = SamplingSpec(seed=1, temperature=0.0)


@pytest.fixture(scope="session")
def texts(tokenizer: Tokenizer) -> TokenTexts:
    return TokenTexts(tokenizer)


@pytest.fixture
def start(tokenizer: Tokenizer, texts: TokenTexts) -> Any:
    def start(**changes: Any) -> tuple[RunningJob, ReplyOutbox]:
        outbox = ReplyOutbox("g1")
        claim = JobClaim(make_job(**changes), attempt=2)
        return RunningJob(claim, outbox, tokenizer=tokenizer, texts=texts), outbox

    return start


def feed(
    generation: RunningJob,
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


def test_negative_seed_becomes_a_valid_seed(start: Any) -> None:
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
    assert outbox.to_end == [generation.report]


def test_greedy_choices_share_one_sequence(start: Any, tokenizer: Tokenizer) -> None:
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
    reported = [
        (each.choice, len(each.token_ids), each.cumulative_logprob) for each in outbox.deltas
    ]
    assert reported == [(0, 2, -2.0), (1, 1, -0.5), (2, 1, -9.0), (3, 1, -1.0)]
    assert all(not delta.logprobs for delta in outbox.deltas)
    assert outbox.finished[0].completion_tokens == 5
    assert outbox.finished[0].chosen == [1, 0]


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
    first, second, third = decode_logprobs(*outbox.prompts[0].logprobs)
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
    entries = decode_logprobs(*outbox.prompts[0].logprobs)
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
    entries = [entry for delta in outbox.deltas for entry in decode_logprobs(delta.logprobs)]
    assert len(entries) == fed == outbox.finished[0].completion_tokens
    assert all(entry.offset <= len(" one t") for entry in entries)


def test_held_back_text_is_sent_with_the_end(start: Any, tokenizer: Tokenizer) -> None:
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
    (entry,) = decode_logprobs(last.logprobs)
    assert (entry.token, entry.offset) == (
        "</s>",
        len(tokenizer.decode([word])),
    )


def test_stop_token_is_the_stop_reason(start: Any) -> None:
    generation, outbox = start(sampling=SamplingSpec(seed=1, stop_token_ids=[400]))
    feed(generation, 0, [400], end=SequenceEnd.STOP, stop_token_id=400)
    assert outbox.deltas[-1].stop_reason == 400
    assert text_of(outbox.deltas) == ""


def test_other_end_of_text_of_the_model_is_no_stop_reason(start: Any) -> None:
    generation, outbox = start(includes_stop=True)
    feed(generation, 0, [400], end=SequenceEnd.STOP, stop_token_id=400)
    assert (text_of(outbox.deltas), outbox.deltas[-1].stop_reason) == ("", None)


def test_job_without_stream_is_sent_in_large_deltas(start: Any) -> None:
    generation, outbox = start(stream=False, max_tokens=1000)
    for _ in range(2 * GATHERED_TOKENS + 5):
        feed(generation, 0, [400])
    assert [len(delta.token_ids) for delta in outbox.deltas] == [GATHERED_TOKENS] * 2
    feed(generation, 0, [400], end=SequenceEnd.LENGTH)
    assert [len(delta.token_ids) for delta in outbox.deltas] == [GATHERED_TOKENS] * 2 + [6]


def test_text_is_gathered_until_due_except_first_and_last(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(max_tokens=4)
    ids = tokenizer.encode("one two three four", add_special_tokens=False).ids[:4]
    sequence_id = generation.sequences[0].id
    reported = []
    for position, token_id in enumerate(ids):
        end = SequenceEnd.LENGTH if position == 3 else None
        generation.receive(SequenceOutput(sequence_id, [token_id], end), is_due=False)
        reported.append(len(outbox.deltas))
    assert reported == [1, 1, 1, 2]
    assert [delta.token_ids for delta in outbox.deltas] == [ids[:1], ids[1:]]
    assert text_of(outbox.deltas) == tokenizer.decode(ids)


def test_token_without_text_waits_for_its_character(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(logprobs=0)
    ids = tokenizer.encode("日").ids
    for token_id in ids:
        feed(generation, 0, [token_id], logprobs=[[(token_id, -1.0)]])
    (delta,) = outbox.deltas
    assert (delta.text, delta.token_ids) == ("日", ids)
    assert [entry.offset for entry in decode_logprobs(delta.logprobs)] == [0] * len(ids)


def test_alternatives_with_equal_text_are_all_sent(start: Any, tokenizer: Tokenizer) -> None:
    half_a, half_b = tokenizer.encode("日").ids[0], tokenizer.encode("語").ids[-1]
    word = tokenizer.encode(" one").ids[0]
    generation, outbox = start(logprobs=3)
    scores = [(word, -3.0), (half_a, -1.0), (half_b, -2.0), (word, -3.0)]
    feed(generation, 0, [word], logprobs=[scores])
    (entry,) = decode_logprobs(outbox.deltas[0].logprobs)
    assert entry.top == [("\ufffd", -1.0), ("\ufffd", -2.0), (tokenizer.decode([word]), -3.0)]


def test_requested_stop_token_is_included_with_stop_strings(
    start: Any, tokenizer: Tokenizer
) -> None:
    one, two = tokenizer.encode(" one two", add_special_tokens=False).ids[:2]
    spec = SamplingSpec(seed=1, stop_token_ids=[two])
    for includes_stop, shown in ((False, [one]), (True, [one, two])):
        generation, outbox = start(sampling=spec, includes_stop=includes_stop, logprobs=0)
        feed(generation, 0, [one], logprobs=[[(one, -1.0)]])
        scores = [[(two, -1.0)]]
        feed(generation, 0, [two], end=SequenceEnd.STOP, stop_token_id=two, logprobs=scores)
        assert text_of(outbox.deltas) == tokenizer.decode(shown)
        assert decode_logprobs(outbox.deltas[-1].logprobs)[0].token == tokenizer.decode([two])


def test_stop_string_is_included_on_request(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(stop=["wo th"], includes_stop=True, max_tokens=50)
    ids = tokenizer.encode(" one two three four").ids
    assert any(feed(generation, 0, [token_id]) for token_id in ids)
    assert text_of(outbox.deltas) == " one two th"
    assert outbox.deltas[-1].stop_reason == "wo th"


def test_stop_strings_wait_for_min_tokens(start: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" one two one two one", add_special_tokens=False).ids
    before = len(tokenizer.encode(" one two", add_special_tokens=False).ids)
    spec = SamplingSpec(seed=1, min_tokens=before)
    generation, outbox = start(stop=["two"], sampling=spec, max_tokens=50)
    assert any(feed(generation, 0, [token_id]) for token_id in ids)
    assert text_of(outbox.deltas) == " one two one "


def test_repetition_ends_a_sequence_with_its_last_token_in_the_text(
    start: Any, tokenizer: Tokenizer
) -> None:
    generation, outbox = start()
    (word,) = tokenizer.encode(" the", add_special_tokens=False).ids
    feed(generation, 0, [word])
    feed(generation, 0, [word], end=SequenceEnd.REPETITION)
    assert text_of(outbox.deltas) == " the the"
    last = outbox.deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "repetition")


def test_special_tokens_show_but_never_the_end_of_text(start: Any, tokenizer: Tokenizer) -> None:
    generation, outbox = start(shows_special_tokens=True)
    bos, eos = tokenizer.encode("<s></s>").ids
    feed(generation, 0, [bos])
    feed(generation, 0, [eos], end=SequenceEnd.STOP)
    assert text_of(outbox.deltas) == "<s>"


def test_time_limit_ends_a_text_after_a_line_end(
    start: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("worker.execution.sequence.time.monotonic", lambda: now)
    generation, outbox = start(max_predict_ms=500, max_tokens=50, stop=["never"])
    (word,) = tokenizer.encode(" the", add_special_tokens=False).ids
    (line,) = tokenizer.encode("\n", add_special_tokens=False).ids
    now = 200.0
    assert not feed(generation, 0, [word])
    now = 200.6
    assert not feed(generation, 0, [word]), "no line has ended"
    assert feed(generation, 0, [line])
    assert text_of(outbox.deltas) == " the the\n"
    assert outbox.deltas[-1].finish_reason is FinishReason.LENGTH
    generation, _ = start(max_predict_ms=500, max_tokens=50)
    assert not feed(generation, 0, [line]), "the time counts from the first token"
    now = 201.2
    assert feed(generation, 0, [word]), "a line ended before"


def ranked(start: Any, tokenizer: Tokenizer, scores: list[list[float]], **changes: Any) -> Any:
    """Feed each sequence a token for each score, and return which are chosen."""
    generation, outbox = start(max_tokens=9, **changes)
    for index, logprobs in enumerate(scores):
        for position, logprob in enumerate(logprobs):
            end = SequenceEnd.LENGTH if position == len(logprobs) - 1 else None
            feed(generation, index, [400 + index], end=end, logprobs=[[(400 + index, logprob)]])
    return outbox.finished[0].chosen


def test_ranking_by_sum_prefers_short_texts(start: Any, tokenizer: Tokenizer) -> None:
    scores = [[-1.0, -1.0], [-1.5], [-9.0]]
    by_sum = ranked(start, tokenizer, scores, n=2, best_of=3, ranking=Ranking.SUM)
    by_mean = ranked(start, tokenizer, scores, n=2, best_of=3)
    assert (by_sum, by_mean) == ([1, 0], [0, 1])


def test_ranking_by_sum_orders_even_if_all_are_returned(start: Any, tokenizer: Tokenizer) -> None:
    scores = [[-3.0], [-1.0], [-1.0]]
    reported = ranked(start, tokenizer, scores, n=3, best_of=3, ranking=Ranking.SUM)
    assert reported == [1, 2, 0], "ties by index"


def test_best_of_without_tokens_reads_the_prompt_once(start: Any) -> None:
    generation, outbox = start(max_tokens=0, n=2, best_of=4, ranking=Ranking.SUM)
    (request,) = generation.requests()
    assert (request.max_tokens, request.grammar) == (1, "")
    feed(generation, 0, [400], end=SequenceEnd.LENGTH)
    assert [delta.choice for delta in outbox.deltas] == [0, 1]


def test_images_reach_the_engine_and_are_dropped(start: Any) -> None:
    generation, _ = start(images=[b"a", b"b"], n=2)
    assert generation.is_slow_to_submit
    assert [request.images for request in generation.requests()] == [[b"a", b"b"]] * 2
    generation.release_media()
    assert generation.job.images == []


def test_counts_and_times_come_from_the_engine(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("worker.execution.running_job.time.monotonic", lambda: now)
    generation, outbox = start()
    now = 10.25
    feed(generation, 0, [400], prompt_tokens=77, cached_tokens=5)
    now = 12.25
    feed(generation, 0, [400], end=SequenceEnd.LENGTH)
    (finished,) = outbox.finished
    assert (finished.prompt_tokens, finished.cached_tokens) == (77, 5)
    assert (finished.prefill_ms, finished.generation_ms) == (250.0, 2000.0)


def test_offsets_follow_the_text_across_split_characters(start: Any, tokenizer: Tokenizer) -> None:
    text = "a 日本 naïve 😀 fin"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    generation, outbox = start(logprobs=20, max_tokens=99)
    for token_id in ids:
        scores = [(token_id, -1.0), *((500 + rank, -2.0 - rank) for rank in range(20))]
        feed(generation, 0, [token_id], logprobs=[scores])
    entries = [entry for delta in outbox.deltas for entry in decode_logprobs(delta.logprobs)]
    assert text_of(outbox.deltas) == "".join(entry.token for entry in entries) == text
    assert any(entry.token == "" for entry in entries), "a character is split between tokens"
    assert all(text[entry.offset :].startswith(entry.token) for entry in entries)
    assert max(len(entry.top or []) for entry in entries) == 21
