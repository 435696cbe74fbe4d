"""Documents for fill-in-the-middle: prefix, suffix, then the middle that was cut out."""

from random import Random

from scripts.demo_model.corpus import facts, programs, stories


def cut(rng: Random, text: str) -> str:
    """The text in prefix-suffix-middle order, cut at two places."""
    if rng.random() < 0.5 and "\n" in text.strip():
        breaks = [index + 1 for index, letter in enumerate(text) if letter == "\n"]
        breaks += [
            index
            for index, letter in enumerate(text)
            if text[index - 4 : index] == "    " and letter != " "
        ]
    else:
        breaks = [index for index, letter in enumerate(text) if letter == " "]
    breaks = sorted({0, len(text), *breaks})
    first, second = sorted(rng.sample(breaks, 2))
    second = min(
        second, next((stop for stop in breaks if stop >= first + rng.choice([8, 30, 80])), second)
    )
    return f"<|fim_prefix|>{text[:first]}<|fim_suffix|>{text[second:]}<|fim_middle|>{text[first:second]}"


def infill(rng: Random) -> str:
    """A cut Python function, fact or story."""
    draw = rng.random()
    if draw < 0.5:
        return cut(rng, programs.known_program(rng))
    if draw < 0.6:
        return cut(rng, programs.program(rng))
    if draw < 0.8:
        return cut(rng, facts.capital_list(rng))
    return cut(rng, stories.free_text(rng))
