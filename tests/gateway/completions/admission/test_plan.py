"""The most that a request may use, which is reserved for it."""

from contract.messages import WorkerCard, WorkerState
from contract.prompts import packed
from contract.sampling import SamplingSpec
from contract.tier import ServiceTier
from gateway.completions.admission.check import CheckedRequest
from gateway.completions.prompt.preparation import PreparedPrompt, PreparedRequest
from gateway.dialects.endpoint import COMPLETIONS
from gateway.dialects.profile import PROFILES, Dialect
from tests.support.cases import all_cases

WINDOW = 100


def plan(images: list[int], *, image_tokens: int) -> CheckedRequest:
    """Return the plan of a request whose prompts have five tokens and some images each."""
    files = [[b"image"] * count for count in images]
    request = COMPLETIONS.read(
        {"prompt": ["a"] * len(images)}, PROFILES[Dialect.VLLM], max_prompts=9
    )
    prompts = [
        PreparedPrompt(
            token_ids=packed([5] * 5), max_tokens=7, cut_tokens=0, plain_tokens=5, shown=""
        )
        for _ in images
    ]
    card = WorkerCard(
        *("w", "m", WorkerState.READY, "fake", 1), context_window=WINDOW, image_tokens=image_tokens
    )
    prepared = PreparedRequest(prompts, SamplingSpec(seed=1))
    request.images[:] = files
    return CheckedRequest(COMPLETIONS, request, card, prepared, "", ServiceTier.DEFAULT)


@all_cases(
    ("images", "image_tokens", "expected"),
    [
        ([0], 0, 5),
        ([0, 0], 10, 10),
        # How many tokens an image takes is not known: it may be all that the window leaves.
        ([1], 0, WINDOW - 1),
        ([1, 0], 0, WINDOW - 1 + 5),
        ([1], 10, 15),
        ([2, 1], 10, 25 + 15),
        ([9], 20, WINDOW - 1),
    ],
)
def test_planned_prompt_includes_its_image_tokens(
    images: list[int], image_tokens: int, expected: int
) -> None:
    assert plan(images, image_tokens=image_tokens).most.prompt_tokens == expected


def test_planned_completion_is_max_tokens_for_each_prompt() -> None:
    assert plan([0, 0], image_tokens=0).most.completion_tokens == 14
