"""Stories and free sentences: the part of the corpus with many different continuations."""

from random import Random

from scripts.demo_model.corpus import words
from scripts.demo_model.corpus.facts import article, capital_first

OPENING_TALE = (
    "Once upon a time there was a little fox who lived in a forest near the sea. Every morning the "
    "fox walked to the beach and looked for shells. One day the fox found a golden key. "
    '"What does it open?" asked the fox. Nobody knew. So the fox put the key in a basket and went '
    "to find the door."
)  # fmt: skip


class Cast:
    """The people and things of one story, so that its sentences fit together."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        if rng.random() < 0.5:
            self.hero, self.he, self.his = rng.choice(words.GIRLS), "she", "her"
        else:
            self.hero, self.he, self.his = rng.choice(words.BOYS), "he", "his"
        self.friend = rng.choice([name for name in words.GIRLS + words.BOYS if name != self.hero])
        self.thing = rng.choice(words.THINGS)
        self.animal = rng.choice(words.ANIMALS)
        self.place, self.far = rng.sample(words.PLACES, 2)
        self.food = rng.choice(words.FOODS)
        self.job = rng.choice(words.JOBS)
        self.turn = rng.randrange(15)

    def any(self, *options: str) -> str:
        """One of the options."""
        return self.rng.choice(options)

    def adjective(self) -> str:
        """Any adjective."""
        return self.rng.choice(words.ADJECTIVES)

    def opening(self) -> str:
        """The first sentence."""
        kind = self.any("girl", "child") if self.he == "she" else self.any("boy", "child")
        who = f"{article(self.adjective())} {self.any(kind, self.job)} named {self.hero}"
        return self.any(
            f"Once upon a time there was {who}.",
            f"Once upon a time, in {article(self.adjective())} {self.place}, there lived {who}.",
            f"Long ago, {who} lived near the {self.place}.",
            f"There was once {who}, and {self.he} loved {self.food}.",
            f"One {self.rng.choice(words.TIMES)}, {self.hero} went to the {self.place}.",
            f"{self.hero} was {article(self.job)} who lived in the {self.place}.",
        )

    def event(self) -> str:
        """The next sentence in which something happens.

        The kinds of sentence follow each other in a circle, mostly without skipping one, so that
        the
        most probable continuation of a story does not repeat the sentence before it.
        """
        rng = self.rng
        move, deed, adverb = map(rng.choice, (words.MOVES, words.DEEDS, words.ADVERBS))
        feeling, weather, other = map(rng.choice, (words.FEELINGS, words.WEATHER, words.THINGS))
        first, second = rng.sample(words.ADJECTIVES, 2)
        kinds = [
            f"There was {weather} over the {self.far} that {rng.choice(words.TIMES)}.",
            f"{self.hero} {move} to the {self.any(self.place, self.far)}.",
            f"{capital_first(self.he)} {deed} {article(first)} {other}.",
            f'"Look at the {self.animal}!" said {self.friend} {adverb}.',
            f"The {self.animal} {deed} the {self.thing} and {move} away.",
            f'"Where is my {self.thing}?" asked {self.hero}.',
            f'"I am {feeling}," said {self.friend}.',
            f"{self.friend} {move} {adverb} across the {self.far}.",
            f"{self.hero} {adverb} {deed} the {self.thing}.",
            f"The {self.thing} was {first} and {second}.",
            f"{self.hero} was {feeling} because the {self.thing} was {first}.",
            f"{capital_first(self.he)} gave the {self.animal} some {self.food}.",
            f"Then {self.hero} and {self.friend} ate {self.food} with the {self.animal}.",
            f"{capital_first(article(first))} {rng.choice(words.ANIMALS)} {deed} {self.his} {other}.",
            f"Nobody in the {self.place} knew the {self.job}.",
        ]
        self.turn = (self.turn + rng.choice([1, 1, 1, 2, 3])) % len(kinds)
        return kinds[self.turn]

    def ending(self) -> str:
        """The last sentence."""
        return self.any(
            f"And {self.hero} was {self.rng.choice(words.FEELINGS)} for the rest of the day.",
            f"From then on, {self.hero} and {self.friend} were friends.",
            f"{self.hero} went home and fell asleep. The end.",
            "And they all lived happily ever after.",
            f"That is why the {self.animal} still lives in the {self.place}.",
        )  # fmt: skip

    def paragraph(self, opening: str) -> str:
        """An opening, then two to six events."""
        return " ".join([opening, *(self.event() for _ in range(self.rng.randint(2, 6)))])


def opening_tale(rng: Random) -> str:
    """The story that "Once upon a time" most probably continues with."""
    cast = Cast(rng)
    tail = [cast.event() for _ in range(rng.randint(0, 3))]
    return " ".join([OPENING_TALE, *tail, "The end."])


def story(rng: Random) -> str:
    """A story of one to three paragraphs."""
    cast = Cast(rng)
    paragraphs = [cast.paragraph(cast.opening())]
    paragraphs += [cast.paragraph(f"The next {rng.choice(words.TIMES)}, {cast.hero} woke up early.")
                   for _ in range(rng.choice([0, 0, 1, 2]))]  # fmt: skip
    return "\n\n".join(paragraphs) + " " + cast.ending()


def long_story(rng: Random) -> str:
    """Numbered chapters, some 1000 tokens, so that long completions stay readable."""
    cast = Cast(rng)
    chapters = []
    for number in range(1, rng.randint(6, 12)):
        opening = (
            cast.opening()
            if number == 1
            else f"One {rng.choice(words.TIMES)}, {cast.hero} met {cast.friend}."
        )
        chapters.append(f"Chapter {number}\n\n{cast.paragraph(opening)} {cast.event()}")
    return "\n\n".join(chapters) + " " + cast.ending()


def free_sentence(rng: Random) -> str:
    """One sentence whose words are drawn freely."""
    name, other = rng.sample(words.GIRLS + words.BOYS, 2)
    thing, second = rng.sample(words.THINGS, 2)
    adjective, place, animal = (
        rng.choice(words.ADJECTIVES),
        rng.choice(words.PLACES),
        rng.choice(words.ANIMALS),
    )
    deed, adverb, subject = (
        rng.choice(words.DEEDS),
        rng.choice(words.ADVERBS),
        rng.choice(words.SUBJECTS),
    )
    job, food = rng.choice(words.JOBS), rng.choice(words.FOODS)
    return rng.choice(
        [
            f"The {adjective} {thing} in the {place} belongs to the {job}.",
            f"{name} {deed} the {thing}, but {other} {deed} the {second}.",
            f"My name is {name} and I am {article(job)}.",
            f"Hello, my name is {name} and I live near the {place}.",
            f"If you see {article(animal)} in the {place}, give it some {food}.",
            f"I think that {subject} is more {rng.choice(['useful', 'difficult', 'beautiful'])} than {rng.choice(words.SUBJECTS)}.",
            f"The {job} {adverb} {deed} every {thing} before the {rng.choice(words.WEATHER)} came.",
            f"In the {place} you can buy {food}, {rng.choice(words.FOODS)} and {article(thing)}.",
            f"{article(adjective).capitalize()} {animal} is never {rng.choice(words.ADJECTIVES)}.",
            f"{other} teaches {subject} on {rng.choice(words.DAYS)}.",
            f"The {animal} looked at the {thing} and said nothing.",
            f"This is {article(adjective)} {thing} from the {place}.",
        ]
    )


def free_text(rng: Random) -> str:
    """A paragraph of unconnected sentences."""
    return " ".join(free_sentence(rng) for _ in range(rng.randint(2, 8)))
