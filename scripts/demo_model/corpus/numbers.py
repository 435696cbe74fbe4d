"""Documents about counting, order and small arithmetic."""

from collections.abc import Callable, Sequence
from random import Random

from scripts.demo_model.corpus import facts, words

Operation = Callable[[Random], tuple[str, int]]


def addition(rng: Random) -> tuple[str, int]:
    """A sum of two numbers up to 20 as text, and its value."""
    first, second = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.5:
        first, second = first % 10, second % 10
    return f"{first} + {second}", first + second


def subtraction(rng: Random) -> tuple[str, int]:
    """A difference that is not negative, as text, and its value."""
    second, difference = rng.randint(0, 10), rng.randint(0, 10)
    return f"{second + difference} - {second}", difference


def multiplication(rng: Random) -> tuple[str, int]:
    """A product from the table up to ten, as text, and its value."""
    first, second = rng.randint(1, 10), rng.randint(1, 10)
    return f"{first} * {second}", first * second


def operation(rng: Random) -> tuple[str, int]:
    """One small calculation; additions are the most frequent."""
    makers: list[Operation] = [addition, addition, addition, subtraction, multiplication]
    return rng.choice(makers)(rng)


def arithmetic(rng: Random) -> str:
    """A column of calculations."""
    rows = [operation(rng) for _ in range(rng.randint(2, 12))]
    style = rng.random()
    if style < 0.6:
        return "\n".join(f"{text} = {value}" for text, value in rows)
    if style < 0.8:
        return ", ".join(f"{text} = {value}" for text, value in rows) + "."
    return "\n".join(f"Q: What is {text}?\nA: {value}" for text, value in rows)


def table(rng: Random) -> str:
    """The row of one number in the multiplication table."""
    number = rng.randint(1, 10)
    return "\n".join(f"{number} * {factor} = {number * factor}" for factor in range(1, 11))


def counting(rng: Random) -> str:
    """Numbers in equal steps, mostly one by one from 1."""
    style = rng.random()
    if style < 0.45:
        start, step, count = 1, 1, rng.choice([10, 20, 20, 30, 50, 100])
    elif style < 0.8:
        start, step, count = rng.randint(0, 150), 1, rng.randint(10, 60)
    else:
        step = rng.choice([2, 3, 5, 10])
        start, count = step * rng.randint(0, 3), rng.randint(8, 20)
    numbers = [str(start + step * index) for index in range(count)]
    separator = rng.choice([", ", ", ", " ", "\n"])
    return separator.join(numbers) + ("." if separator == ", " else "")


def countdown(rng: Random) -> str:
    """Numbers downwards to 1, and a rocket."""
    return ", ".join(map(str, range(rng.choice([3, 5, 10, 10, 10, 20]), 0, -1))) + ", lift-off! 🚀"


def _in_order(rng: Random, items: Sequence[str], *, cycle: bool) -> str:
    separator = rng.choice([", ", ", ", " ", "\n"])
    if not cycle:
        return separator.join(items)
    start = rng.randrange(len(items)) if rng.random() < 0.5 else 0
    length = rng.choice([len(items), 2 * len(items)])
    return separator.join(items[(start + index) % len(items)] for index in range(length))


def ordered_words(rng: Random) -> str:
    """Days, months, letters, planets, ordinals or number words in their order."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    choice = rng.randrange(7)
    if choice < 2:
        return _in_order(rng, [words.DAYS, words.MONTHS][choice], cycle=True)
    lists: list[Sequence[str]] = [
        letters, letters.upper(), facts.PLANETS, words.ORDINALS, words.NUMBER_WORDS[1:]
    ]  # fmt: skip
    return _in_order(rng, lists[choice - 2], cycle=False)


def chain_of_thought(rng: Random) -> tuple[str, str, str]:
    """A sum of two-digit numbers: the text, the steps to the answer, the answer."""
    first, second = rng.randint(10, 49), rng.randint(10, 49)
    tens, ones = first // 10 * 10 + second // 10 * 10, first % 10 + second % 10
    steps = (
        f"{first // 10 * 10} + {second // 10 * 10} = {tens}, "
        f"{first % 10} + {second % 10} = {ones}, {tens} + {ones} = {tens + ones}"
    )
    return f"{first} + {second}", steps, str(tens + ones)
