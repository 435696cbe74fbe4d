"""Images on the real engine, with a tiny random model: they count, bad ones do no harm."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from contract.messages import ContextExcess, Feature, GenerationJob, JobFinished, decode_logprobs
from contract.prompts import packed
from contract.sampling import SamplingSpec
from tests.support.vision_model import IMAGE_TOKEN, TOKENS_OF_IMAGE
from tests.worker.conftest import make_job
from tests.worker.real_engine import MARKS, VISION, EngineSlot, generation_of, run_jobs
from tests.worker.test_images import HOSTILE, image_file
from worker.engine.base import EngineRequest, InvalidRequestError, SequenceOutput
from worker.engine.vllm.engine import VllmEngine
from worker.model_files import context_window
from worker.queue.replies import ReplyOutbox

pytestmark = [*MARKS, pytest.mark.long]

CONTEXT_WINDOW = VISION["context_window"]
RED, BLUE = image_file(color="red"), image_file(color="blue")
AROUND = 3
"""Tokens that the model puts around an image."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(engine_slot: EngineSlot, vision_folder: Path) -> VllmEngine:
    return await engine_slot.engine(model_path=str(vision_folder), **VISION)


def seeing(engine: VllmEngine, text: str, *images: bytes, **changes: object) -> GenerationJob:
    tokenizer = Tokenizer.from_buffer(engine.info.tokenizer_json)
    spec = SamplingSpec(seed=1, temperature=0.0, ignore_eos=True)
    fields = {"max_tokens": 8, "logprobs": 0, "sampling": spec, **changes}
    return make_job(prompt_token_ids=tokenizer.encode(text).ids, images=list(images), **fields)


async def answers(engine: VllmEngine, *jobs: GenerationJob) -> list[ReplyOutbox]:
    return (await run_jobs(engine, jobs)).outboxes


def scores(outbox: ReplyOutbox) -> list[float | None]:
    return [entry.logprob for delta in outbox.deltas for entry in decode_logprobs(delta.logprobs)]


def finished(outbox: ReplyOutbox) -> JobFinished:
    (end,) = outbox.finished
    return end


async def test_model_announces_vision(engine: VllmEngine, vision_folder: Path) -> None:
    assert engine.info.features == [
        Feature.SAMPLER_CHAIN,
        Feature.STRUCTURE,
        Feature.IMAGES,
        Feature.CHAT,
    ]
    assert (engine.info.image_token, engine.info.max_images) == (IMAGE_TOKEN, 100)
    assert engine.info.image_tokens == TOKENS_OF_IMAGE + AROUND
    assert engine.info.chat is not None
    assert (engine.info.chat.tool_parser, engine.info.chat.reasoning_parser) == ("", "")
    assert context_window(vision_folder) == 2048


async def test_content_number_and_order_of_images_matter(engine: VllmEngine) -> None:
    jobs = [
        seeing(engine, "What is this?"),
        seeing(engine, "<image>What is this?", RED),
        seeing(engine, "<image>What is this?", BLUE),
        seeing(engine, "<image><image>What is this?", RED, BLUE),
        seeing(engine, "<image><image>What is this?", BLUE, RED),
        seeing(engine, "<image>What is this?", RED, cache_salt="another tenant"),
    ]
    outboxes = await answers(engine, *jobs)
    reported = [tuple(scores(outbox)) for outbox in outboxes]
    assert len(set(reported[:5])) == 5
    assert reported[5] == pytest.approx(reported[1], abs=1e-2)


async def test_prompt_tokens_are_counted_with_the_images(engine: VllmEngine) -> None:
    jobs = [seeing(engine, "<image>" * n + "What is this?", *[RED] * n, n=2) for n in range(3)]
    text, one, two = [finished(outbox) for outbox in await answers(engine, *jobs)]
    assert text.prompt_tokens == len(jobs[0].prompt_token_ids)
    assert one.prompt_tokens == text.prompt_tokens + TOKENS_OF_IMAGE + AROUND
    assert two.prompt_tokens == one.prompt_tokens + TOKENS_OF_IMAGE + AROUND


async def test_images_are_cached_for_one_tenant_only(engine: VllmEngine) -> None:
    prompt = "<image>" + "the file " * 70

    async def cached(image: bytes, salt: str) -> int:
        job = seeing(engine, prompt, image, max_tokens=1, cache_salt=salt)
        return finished((await answers(engine, job))[0]).cached_tokens

    assert await cached(RED, "a") == 0
    assert await cached(RED, "a") >= 128
    assert await cached(RED, "b") == 0
    assert await cached(BLUE, "a") == 0


async def test_sequence_resumes_after_its_images_and_earlier_tokens(engine: VllmEngine) -> None:
    spec = SamplingSpec(seed=5, temperature=2.0, frequency_penalty=1.0, ignore_eos=True)
    tokenizer = Tokenizer.from_buffer(engine.info.tokenizer_json)
    whole = EngineRequest(
        id="whole",
        prompt_token_ids=tokenizer.encode("<image>What<image>is this?").ids,
        images=[RED, BLUE],
        image_params=["images[0]", "images[1]"],
        max_tokens=24,
        sampling=spec,
        seed=5,
        cache_salt="",
    )

    async def outputs(request: EngineRequest) -> list[SequenceOutput]:
        reported: list[SequenceOutput] = []
        await engine.submit([request])
        while not (reported and reported[-1].end):
            reported += (await engine.step()).outputs
        return reported

    undisturbed = await outputs(whole)
    tokens = [token for output in undisturbed for token in output.token_ids]
    for cut in (1, 9, 23):
        rest = await outputs(replace(whole, id=f"after {cut}", output_token_ids=tokens[:cut]))
        assert [token for output in rest for token in output.token_ids] == tokens[cut:]
        assert rest[0].prompt_tokens == undisturbed[0].prompt_tokens
        assert rest[-1].end is undisturbed[-1].end


async def test_images_reduce_max_tokens(engine: VllmEngine) -> None:
    job = seeing(engine, "<image>" * 8, *[RED] * 8, max_tokens=CONTEXT_WINDOW - 8)
    (outbox,) = await answers(engine, job)
    end = finished(outbox)
    assert end.prompt_tokens > 8 * TOKENS_OF_IMAGE
    assert end.prompt_tokens + end.completion_tokens == CONTEXT_WINDOW
    strict = seeing(engine, "<image>" * 8, *[RED] * 8, max_tokens=240, may_shorten=False)
    with pytest.raises(InvalidRequestError, match=r"at most 256 tokens. Given: \d+ \+ 240") as e:
        await answers(engine, strict)
    assert e.value.excess == ContextExcess(end.prompt_tokens, 240, CONTEXT_WINDOW)
    full = seeing(engine, "<image>" * 8, *[RED] * 8, max_tokens=1)
    prompt = [*full.prompt_token_ids, *[300] * (CONTEXT_WINDOW - 20)]
    full = msgspec.structs.replace(full, prompt_token_ids=packed(prompt))
    with pytest.raises(InvalidRequestError, match="must be less than the context window of 256"):
        await answers(engine, full)


@pytest.mark.parametrize(
    ("text", "images", "message"),
    [
        ("<image>", [], r"as many as the prompt has <image> tokens \(1\). Given: 0"),
        ("none", [RED], r"tokens \(0\). Given: 1"),
        ("<image><image>", [RED], r"tokens \(2\). Given: 1"),
        ("<image>" * 101, [RED] * 101, "at most 100 for this model. Given: 101"),
    ],
    ids=["too few", "unmarked", "one missing", "too many"],
)
async def test_number_of_images_must_fit_the_prompt(
    engine: VllmEngine, text: str, images: list[bytes], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await answers(engine, seeing(engine, text, *images))


async def test_hostile_files_are_refused_and_the_engine_survives(engine: VllmEngine) -> None:
    alone = await answers(engine, seeing(engine, "<image>What", RED, max_tokens=150))
    begun = asyncio.Event()
    job = seeing(engine, "<image>What", RED, max_tokens=150)
    running = asyncio.create_task(run_jobs(engine, [job], begun=begun))
    await begun.wait()
    refused = {}
    odd = {f"{w} x {h}": image_file(size=(w, h)) for w, h in [(1, 1), (16_000, 1), (1, 16_000)]}
    for name, content in {**{key: file for key, (file, _) in HOSTILE.items()}, **odd}.items():
        try:
            job = seeing(engine, "<image>", content, max_tokens=1)
            await engine.submit(generation_of(engine, job).requests())
        except InvalidRequestError as error:
            refused[name] = str(error)
        await asyncio.sleep(0)
    assert set(HOSTILE) <= set(refused)
    assert all(message.startswith(("'images[0]' ", "images: ")) for message in refused.values())
    assert scores((await running).outboxes[0]) == pytest.approx(scores(alone[0]), abs=1e-2)
