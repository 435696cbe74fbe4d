"""A job that resumes after the tokens of an earlier attempt gives an undisturbed response."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from contract.messages import (
    Delta,
    GenerationJob,
    JobFailed,
    JobFinished,
    JobStarted,
    Pooling,
    PoolingTask,
    Ranking,
    Resumption,
    ReturnReason,
    SequenceProgress,
    TokenLogprob,
    decode_logprobs,
)
from contract.outcomes import FailureCode, FinishReason
from contract.queue import JobClaim
from contract.sampling import SamplingSpec
from contract.tier import ServiceTier
from tests.support.patience import PATIENCE_SECONDS
from tests.support.redis_server import RedisServer
from tests.worker.conftest import Gateway, Stepwise, make_job, resumed, running_worker
from worker.engine.base import SequenceEnd, SequenceOutput
from worker.engine.scripted import Script
from worker.execution.logprobs import TokenTexts
from worker.execution.running_job import RunningJob
from worker.execution.text import Detokenizer
from worker.queue.replies import BYTES_OF_LOGPROB, MOST_DELTAS_IN_FRAME, ReplyOutbox

GREEDY = SamplingSpec(seed=1, temperature=0.0)
STEADY = Script(step_seconds=0.01)

Start = Callable[..., tuple[RunningJob, ReplyOutbox]]


@pytest.fixture
def start(tokenizer: Tokenizer) -> Start:
    texts = TokenTexts(tokenizer)

    def start(job: GenerationJob, attempt: int = 1) -> tuple[RunningJob, ReplyOutbox]:
        outbox = ReplyOutbox("g1")
        generation = RunningJob(JobClaim(job, attempt), outbox, tokenizer=tokenizer, texts=texts)
        generation.begin()
        return generation, outbox

    return start


def feed(generation: RunningJob, token_ids: list[int], *, is_first: bool) -> bool:
    """Feed the first sequence token by token to its end. Return whether it ended early."""
    sequence = generation.sequences[0]
    for position, token_id in enumerate(token_ids):
        is_new = is_first and position == 0
        output = SequenceOutput(
            sequence.id,
            [token_id],
            SequenceEnd.LENGTH if sequence.tokens + 1 == generation.job.max_tokens else None,
            logprobs=[[(token_id, -0.5), (token_id + 1, -1.5)]],
            cached_tokens=2 if is_new else None,
            prompt_tokens=3 if is_new else None,
        )
        if generation.receive(output):
            return True
    return False


class Reported(msgspec.Struct, frozen=True):
    """Everything that a client gets of one choice."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    stop_reason: int | str | None


def reported(deltas: list[Delta], choice: int = 0) -> Reported:
    """Join the deltas of a choice, which must be contiguous."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    text = ""
    mine = [delta for delta in deltas if delta.choice == choice]
    for delta in mine:
        assert delta.start == len(token_ids)
        token_ids += delta.token_ids
        logprobs += decode_logprobs(delta.logprobs)
        text += delta.text
    return Reported(text, token_ids, logprobs, mine[-1].finish_reason, mine[-1].stop_reason)


def cut(job: GenerationJob, deltas: list[Delta], **known: Any) -> GenerationJob:
    """Return the job that resumes after these deltas of its only sequence."""
    token_ids = [token_id for delta in deltas if delta.choice == 0 for token_id in delta.token_ids]
    resumption = Resumption(
        [SequenceProgress(token_ids)], prompt_tokens=3, cached_tokens=2, **known
    )
    return msgspec.structs.replace(job, resumption=resumption)


TEXT = 4 * " one two 日本語 three 😀 naïve four one twice and\n a line\n the end of one thousand"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logprobs": 1},
        {"stop": ["thousand"], "logprobs": 0},
        {"stop": ["one th", "xyz"], "logprobs": 0},
        {"stop": ["three 😀 nai", "本語 t", "e end of o"], "includes_stop": True},
        {"stop": ["two"], "sampling": SamplingSpec(seed=1, min_tokens=8)},
        {"sampling": GREEDY, "n": 3, "stop": ["naïve four one twice and\n a line\n X"]},
        {"stream": False, "stop": ["one thousandth"]},
        {"prompt_token_ids": [300, 600, 100]},
        {"shows_special_tokens": True},
    ],
    ids=[
        "plain",
        "logprobs",
        "stop-last",
        "stop-held",
        "stop-bytes",
        "min",
        "greedy",
        "whole",
        "prompt",
        "special",
    ],
)
def test_resumption_after_every_cut_gives_the_undisturbed_text(
    start: Start, tokenizer: Tokenizer, changes: dict[str, Any]
) -> None:
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    job = make_job(**{"max_tokens": len(token_ids), **changes})
    generation, outbox = start(job)
    feed(generation, token_ids, is_first=True)
    assert generation.is_done
    undisturbed, finished = outbox.deltas, outbox.finished[0]
    assert len(undisturbed) > job.n
    for received in range(1, len(undisturbed) // job.n):
        before = undisturbed[: received * job.n]
        done = sum(len(delta.token_ids) for delta in before if delta.choice == 0)
        generation, outbox = start(cut(job, before), attempt=2)
        (request,) = generation.requests()
        assert request.output_token_ids == token_ids[:done]
        feed(generation, token_ids[done:], is_first=True)
        assert generation.is_done
        for choice in range(job.n):
            assert reported(before + outbox.deltas, choice) == reported(undisturbed, choice)
        after = outbox.finished[0]
        assert after.completion_tokens == finished.completion_tokens
        assert (after.prompt_tokens, after.cached_tokens, after.attempt) == (3, 2, 2)
        assert all(delta.attempt == 2 for delta in outbox.deltas)


def test_streamed_job_reports_its_start_with_its_end(start: Start) -> None:
    generation, outbox = start(make_job(max_tokens=1, stream=True))
    feed(generation, [400], is_first=True)
    assert generation.is_done
    assert outbox.started == [JobStarted(generation.job.handle, 1, 3, 2, "")]


def test_start_is_reported_once_the_prompt_is_processed_but_not_with_the_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, outbox = start(make_job(max_tokens=3, stream=False))
    feed(generation, [400], is_first=True)
    assert outbox.started == [JobStarted(generation.job.handle, 1, 3, 2, "")]
    was_due = outbox.is_due
    feed(generation, [400, 400], is_first=False)
    assert (was_due, outbox.is_due) == (False, True), "a short job needs one frame"
    assert generation.is_done
    assert not outbox.started
    generation, outbox = start(cut(make_job(max_tokens=5), outbox.deltas), attempt=2)
    feed(generation, [400], is_first=True)
    assert outbox.started == [JobStarted(generation.job.handle, 2, 3, 2, "")], "of its own class"
    monkeypatch.setattr("worker.queue.replies.UNSTREAMED_START_SECONDS", 0.0)
    generation, outbox = start(make_job(max_tokens=3, stream=False))
    feed(generation, [400], is_first=True)
    assert outbox.is_due, "the start of a long job is reported on its own"


def test_missing_counts_of_the_first_attempt_are_reported(start: Start) -> None:
    resumption = Resumption([SequenceProgress([400, 401])])
    generation, outbox = start(make_job(resumption=resumption), attempt=2)
    feed(generation, [400], is_first=True)
    assert outbox.started == [JobStarted(generation.job.handle, 2, 3, 2, "")]


def test_prompt_and_cache_counts_stay_those_of_the_first_attempt(start: Start) -> None:
    resumption = Resumption([SequenceProgress([400])], prompt_tokens=77, cached_tokens=5)
    generation, outbox = start(make_job(resumption=resumption, max_tokens=2), attempt=2)
    assert generation.report[2:] == (1, 77, 5), "before the engine has read it again"
    feed(generation, [400], is_first=True)
    assert generation.report[2:] == (2, 77, 5)
    assert (outbox.finished[0].prompt_tokens, outbox.finished[0].cached_tokens) == (77, 5)


def test_prompt_is_not_scored_twice(start: Start) -> None:
    job = make_job(score_prompt=True, logprobs=1)
    assert [each.prompt_logprobs for each in start(job)[0].requests()] == [1]
    for is_scored, asked in ((True, None), (False, 1)):
        resumption = Resumption([SequenceProgress([])], is_prompt_scored=is_scored)
        generation, _ = start(msgspec.structs.replace(job, resumption=resumption))
        assert [each.prompt_logprobs for each in generation.requests()] == [asked]


def test_finished_sequences_are_not_submitted_again(start: Start) -> None:
    done = SequenceProgress([400, 401], FinishReason.STOP, "stop", -0.5)
    resumption = Resumption([SequenceProgress([400], None, None, -3.0), done, SequenceProgress([])])
    job = make_job(n=1, best_of=3, max_tokens=3, resumption=resumption, seed=5)
    generation, outbox = start(job, attempt=2)
    requests = generation.requests()
    assert [(each.seed, each.output_token_ids) for each in requests] == [(5, [400]), (7, [])]
    for index, tokens in ((0, 2), (2, 3)):
        sequence = generation.sequences[index]
        scores = [[(400, -1.0)]] * tokens
        ids = [400] * tokens
        generation.receive(SequenceOutput(sequence.id, ids, SequenceEnd.LENGTH, logprobs=scores))
    assert [(each.choice, each.start, each.cumulative_logprob) for each in outbox.deltas] == [
        (0, 1, -5.0),
        (2, 0, -3.0),
    ]
    (finished,) = outbox.finished
    assert (finished.chosen, finished.completion_tokens) == ([1], 3 + 2 + 3)


@pytest.mark.parametrize(
    ("changes", "finish", "text", "stop_reason"),
    [
        ({"max_tokens": 2}, FinishReason.LENGTH, "", None),
        ({"max_tokens": 2, "stop": [" one two three"]}, FinishReason.LENGTH, " one two", None),
        ({"max_tokens": 9, "stop": ["wo"]}, FinishReason.STOP, "", "wo"),
    ],
    ids=["length", "length-held", "stop"],
)
def test_job_that_earlier_tokens_complete_ends_without_the_engine(
    start: Start,
    tokenizer: Tokenizer,
    changes: dict[str, Any],
    finish: FinishReason,
    text: str,
    stop_reason: str | None,
) -> None:
    token_ids = tokenizer.encode(" one two", add_special_tokens=False).ids
    changes["max_tokens"] += len(token_ids) - 2
    resumption = Resumption([SequenceProgress(token_ids)], prompt_tokens=3, cached_tokens=1)
    generation, outbox = start(make_job(**changes, resumption=resumption), attempt=2)
    assert generation.is_done
    assert not generation.requests()
    (delta,) = outbox.deltas
    assert (delta.start, delta.text, delta.token_ids) == (len(token_ids), text, [])
    assert (delta.finish_reason, delta.stop_reason) == (finish, stop_reason)
    (finished,) = outbox.finished
    assert (finished.completion_tokens, finished.prompt_tokens) == (len(token_ids), 3)


def test_job_with_only_finished_sequences_just_ends(start: Start) -> None:
    done = [SequenceProgress([400], FinishReason.STOP, None, -each) for each in (2.0, 1.0)]
    job = make_job(n=1, best_of=2, ranking=Ranking.SUM, resumption=Resumption(done))
    generation, outbox = start(job, attempt=2)
    assert generation.is_done
    assert not outbox.deltas
    assert outbox.finished[0].chosen == [1]
    assert outbox.to_end == [generation.report]


def test_scored_prompt_without_completion_is_not_processed_again(start: Start) -> None:
    resumption = Resumption([SequenceProgress([])], prompt_tokens=3, is_prompt_scored=True)
    job = make_job(max_tokens=0, n=2, score_prompt=True, logprobs=0, resumption=resumption)
    generation, outbox = start(job)
    assert generation.is_done
    assert [(each.choice, each.finish_reason) for each in outbox.deltas] == [
        (0, FinishReason.LENGTH),
        (1, FinishReason.LENGTH),
    ]


def test_time_limit_counts_what_earlier_attempts_took(
    start: Start, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("worker.execution.sequence.time.monotonic", lambda: now)
    (line,) = tokenizer.encode("\n", add_special_tokens=False).ids
    job = make_job(max_predict_ms=500, max_tokens=50)
    generation, _ = start(cut(job, [], generation_ms=400.0))
    assert not feed(generation, [line], is_first=True)
    now = 100.2
    assert feed(generation, [400], is_first=False)


def test_handing_back_first_sends_pending_text(start: Start, tokenizer: Tokenizer) -> None:
    (half, *_) = tokenizer.encode("日", add_special_tokens=False).ids
    generation, outbox = start(make_job(max_tokens=9, n=2))
    feed(generation, [400, half], is_first=True)
    generation.return_job(ReturnReason.DRAINING)
    assert reported(outbox.deltas).token_ids == [400, half]
    (returned,) = outbox.returned
    assert (returned.reason, returned.has_progressed) == (ReturnReason.DRAINING, True)
    assert outbox.to_release == [generation.report]
    generation, outbox = start(cut(make_job(max_tokens=9), outbox.deltas), attempt=2)
    generation.return_job(ReturnReason.ENGINE_DIED)
    assert not outbox.deltas
    assert not outbox.returned[0].has_progressed, "the tokens are those of another attempt"


def test_frame_that_is_cut_keeps_the_choices_of_a_token_together() -> None:
    outbox = ReplyOutbox("g1")
    for start in range(MOST_DELTAS_IN_FRAME):
        outbox.deltas += [Delta(7, 1, choice, start, "a", [1]) for choice in range(3)]
    expected = list(outbox.deltas)
    seen: list[Delta] = []
    while outbox.deltas:
        frame = outbox.take("w1").frame
        assert len(frame.deltas) % 3 == 0
        assert len(frame.deltas) < MOST_DELTAS_IN_FRAME + 3
        seen += frame.deltas
    assert seen == expected


def test_frame_is_cut_by_the_log_probabilities_that_it_has() -> None:
    outbox = ReplyOutbox("g1")
    logprobs = bytes(99 * BYTES_OF_LOGPROB)
    outbox.deltas = [Delta(7, 1, 0, start, "a", [1], logprobs=logprobs) for start in range(50)]
    numbers = []
    while outbox.deltas:
        numbers.append(len(outbox.take("w1").frame.deltas))
    assert numbers == [MOST_DELTAS_IN_FRAME // 100] * 2 + [10]


def test_frame_is_cut_between_the_vectors_of_a_job() -> None:
    outbox = ReplyOutbox("g1")
    vector = bytes(99 * BYTES_OF_LOGPROB)
    outbox.deltas = [Delta(7, 1, choice, 0, "", [], pooled=vector) for choice in range(50)]
    assert len(outbox.take("w1").frame.deltas) == MOST_DELTAS_IN_FRAME // 100


def test_pooling_job_resumes_with_the_inputs_that_have_no_result(start: Start) -> None:
    ended = SequenceProgress([], FinishReason.LENGTH)
    job = make_job(
        prompt_token_ids=[5, 6, 7, 8, 9, 10],
        max_tokens=0,
        n=3,
        pooling=Pooling(PoolingTask.EMBED, [1, 2, 3], second_texts=[0, 1, 2]),
        resumption=Resumption([ended, SequenceProgress([]), ended], prompt_tokens=6),
    )
    generation, outbox = start(job)
    [request] = generation.requests()
    assert (request.prompt_token_ids, request.second_text) == ([6, 7], 1)
    output = SequenceOutput(request.id, [], SequenceEnd.STOP, cached_tokens=0, pooled=b"1234")
    assert generation.receive(output)
    assert generation.has_progressed
    [delta] = outbox.deltas
    assert (delta.choice, delta.start, delta.pooled, delta.token_ids) == (1, 0, b"1234", [])
    [finished] = outbox.finished
    assert (finished.prompt_tokens, finished.completion_tokens) == (6, 0)


@pytest.mark.parametrize(
    ("resumption", "message"),
    [
        (Resumption([]), "resumption must have 2 sequences, as many as are sampled. Given: 0"),
        (Resumption([SequenceProgress([])] * 3), "must have 2 sequences"),
        (Resumption([SequenceProgress([1]), SequenceProgress([10**6])]), "Given: 1000000"),
        (Resumption([SequenceProgress([1]), SequenceProgress([-1])]), "Given: -1"),
        (Resumption([SequenceProgress([1] * 9), SequenceProgress([])]), "at most 8 entries"),
    ],
    ids=["none", "many", "unknown", "negative", "long"],
)
async def test_malformed_resumption_is_refused(
    redis_server: RedisServer, gateway: Gateway, resumption: Resumption, message: str
) -> None:
    job, good = make_job(n=2, resumption=resumption), make_job()
    async with running_worker(redis_server, STEADY):
        await gateway.enqueue(job, good)
        await gateway.finished(job, good)
    end = gateway.end(job)
    assert isinstance(end, JobFailed)
    assert end.code is FailureCode.INVALID_REQUEST
    assert message in end.message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n": 3},
        {"n": 3, "sampling": GREEDY},
        {"n": 2, "best_of": 4, "stream": False, "max_tokens": 600},
        {"stop": [" the", " of a", " and"], "logprobs": 2, "max_tokens": 900},
    ],
    ids=["one", "n", "greedy", "best_of", "stop"],
)
@pytest.mark.parametrize(
    "reason",
    # A job without its adapter or its prompt has not run.
    sorted({*ReturnReason} - {ReturnReason.ADAPTER_FAILED, ReturnReason.PROMPT_LOST}),
)
async def test_job_continues_at_another_worker(
    redis_server: RedisServer, gateway: Gateway, changes: dict[str, Any], reason: ReturnReason
) -> None:
    job = make_job(**{"seed": 3, "max_tokens": 60, **changes})
    script = Script(
        step_seconds=0.001 if job.max_tokens > 100 else 0.01, max_sequences=job.sequences
    )
    if reason is ReturnReason.PREEMPTED:
        job = msgspec.structs.replace(job, service_tier=ServiceTier.BATCH)
    undisturbed = msgspec.structs.replace(job, id=f"{job.id}-u", handle=10**6 + job.handle)
    choices = range(job.sequences if job.is_ranked else job.n)
    async with running_worker(redis_server, Script(), worker="first"):
        await gateway.enqueue(undisturbed)
        await gateway.finished(undisturbed)
    steps = max(len(gateway.token_ids(undisturbed, choice)) for choice in choices)
    async with running_worker(redis_server, script, worker="second", engine_type=Stepwise) as (
        runner,
        engine,
        task,
    ):
        assert isinstance(engine, Stepwise)
        # It has not ended, however late it is stopped.
        engine.allow(steps - 1)
        await gateway.begin(job)
        if reason is ReturnReason.PREEMPTED:
            urgent = make_job()
            await gateway.enqueue(urgent)
            await gateway.read_until(lambda: bool(gateway.returned(job)))
            engine.allow(urgent.max_tokens + 1)
            await gateway.finished(urgent)
        if reason is ReturnReason.ENGINE_DIED:
            engine.die()
        else:
            runner.stop()
        await asyncio.gather(task, return_exceptions=True)
    await gateway.read_until(lambda: bool(gateway.returned(job)))
    (returned,) = gateway.returned(job)
    assert (returned.attempt, returned.reason, returned.has_progressed) == (1, reason, True)
    first = len(gateway.token_ids(job))
    if not job.stop:
        assert 0 < first < job.max_tokens
    await gateway.queue.requeue(resumed(gateway, job), 1, is_returned=True)
    async with running_worker(redis_server, Script(), worker="third"):
        await gateway.finished(job)
        for choice in choices:
            mine, theirs = (gateway.deltas(each, choice) for each in (job, undisturbed))
            assert {delta.attempt for delta in mine} <= {1, 2}
            assert reported(mine, choice) == reported(theirs, choice)
        end, expected = gateway.end(job), gateway.end(undisturbed)
        assert isinstance(end, JobFinished)
        assert isinstance(expected, JobFinished)
        assert end.completion_tokens == expected.completion_tokens
        assert (end.prompt_tokens, end.cached_tokens, end.chosen) == (3, 0, expected.chosen)
        (receipt,) = await gateway.queue.receipts([job.id])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await gateway.queue.status()).leased_jobs:
                await asyncio.sleep(0.01)
        (receipt,) = await gateway.queue.receipts([job.id])
        assert receipt[1:4] == (expected.completion_tokens, 3, 0)


async def test_tokens_that_cannot_be_decoded_again_fail_their_job_alone(
    redis_server: RedisServer, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(_: Detokenizer, token_id: int) -> str:
        if token_id == 123:
            raise RuntimeError("a bug")
        return "x"

    monkeypatch.setattr(Detokenizer, "step", step)
    bad = make_job(resumption=Resumption([SequenceProgress([123])]))
    good = make_job(sampling=SamplingSpec(seed=1, allowed_token_ids=[400]))
    async with running_worker(redis_server, STEADY) as (_, _, task):
        await gateway.enqueue(bad, good)
        await gateway.finished(bad, good)
        assert not task.done()
    end = gateway.end(bad)
    assert isinstance(end, JobFailed)
    assert end.code is FailureCode.ENGINE_ERROR
    assert isinstance(gateway.end(good), JobFinished)
