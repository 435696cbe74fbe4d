"""Documents that are JSON."""

import json
from random import Random

from scripts.demo_model.corpus import facts, words

Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]


def person(rng: Random) -> dict[str, Value]:
    """A person with a name, an age and a city."""
    record: dict[str, Value] = {
        "name": rng.choice(words.GIRLS + words.BOYS),
        "age": rng.randint(7, 79),
        "city": rng.choice(facts.COUNTRIES).capital,
    }
    if rng.random() < 0.3:
        record["hobbies"] = list(rng.sample(words.SUBJECTS, rng.randint(1, 3)))
    return record


def product(rng: Random) -> dict[str, Value]:
    """A product with a name, a price, whether it is in stock, and tags."""
    name = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.THINGS)}"
    return {
        "name": name,
        "price": rng.randint(1, 99) + rng.choice([0.0, 0.25, 0.5, 0.99]),
        "in_stock": rng.random() < 0.7,
        "tags": list(rng.sample(words.COLOURS + words.SUBJECTS, rng.randint(1, 3))),
    }


def country(rng: Random) -> dict[str, Value]:
    """What is known about one country."""
    return dict(rng.choice(facts.COUNTRIES)._asdict())


def dump(rng: Random, value: Value) -> str:
    """The value as JSON, on one line or indented by two spaces."""
    indent = 2 if rng.random() < 0.35 else None
    return json.dumps(value, ensure_ascii=False, indent=indent)


def record(rng: Random) -> str:
    """An object, or a list of objects of one kind."""
    maker = rng.choice([person, product, product, country])
    if rng.random() < 0.75:
        return dump(rng, maker(rng))
    return dump(rng, [maker(rng) for _ in range(rng.randint(2, 4))])
