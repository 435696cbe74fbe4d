"""The training text of the tiny model: made by rules, the same for the same seed.

Nothing is quoted from elsewhere except traditional proverbs, so the text has the project's own
licence. ``documents`` mixes the makers of the modules beside this file.
"""

from collections.abc import Callable, Iterator
from random import Random

from worker.demo_model.corpus import (
    chat,
    facts,
    infill,
    numbers,
    programs,
    records,
    scripts,
    stories,
)

MAKERS: list[tuple[float, Callable[[Random], str]]] = [
    (9, facts.fact_list),
    (8, facts.capital_list),
    (3, facts.country_page),
    (6, facts.sayings),
    (10, numbers.arithmetic),
    (1, numbers.table),
    (4, numbers.counting),
    (1.5, numbers.countdown),
    (4, numbers.ordered_words),
    (5, stories.opening_tale),
    (12, stories.story),
    (1, stories.long_story),
    (6, stories.free_text),
    (7, programs.program),
    (4, programs.known_program),
    (8, records.record),
    (8, scripts.world_text),
    (2, scripts.fixed_line),
    (18, chat.dialogue),
    (7, chat.reasoning),
    (4, chat.tool_use),
    (6, infill.infill),
]
"""How often each maker is called, relative to the others; shares of tokens differ."""


def documents(seed: int, count: int) -> Iterator[str]:
    """Yield that many documents; a dialogue ends with its own end-of-text token."""
    rng = Random(seed)
    weights = [weight for weight, _ in MAKERS]
    for _ in range(count):
        [(_, maker)] = rng.choices(MAKERS, weights=weights)
        yield maker(rng)
