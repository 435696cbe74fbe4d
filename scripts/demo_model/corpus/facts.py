"""Documents about fixed facts: countries, opposites, colours, animals and the calendar."""

from random import Random
from typing import NamedTuple

from scripts.demo_model.corpus import words


class Country(NamedTuple):
    """What the corpus states about one country."""

    name: str
    capital: str
    continent: str
    language: str


COUNTRIES = [
    Country(*(field.strip() for field in line.split("|")))
    for line in """
France|Paris|Europe|French
Germany|Berlin|Europe|German
Italy|Rome|Europe|Italian
Spain|Madrid|Europe|Spanish
Portugal|Lisbon|Europe|Portuguese
England|London|Europe|English
Ireland|Dublin|Europe|English
Scotland|Edinburgh|Europe|English
Norway|Oslo|Europe|Norwegian
Sweden|Stockholm|Europe|Swedish
Denmark|Copenhagen|Europe|Danish
Finland|Helsinki|Europe|Finnish
Iceland|Reykjavík|Europe|Icelandic
Poland|Warsaw|Europe|Polish
Austria|Vienna|Europe|German
Hungary|Budapest|Europe|Hungarian
Greece|Athens|Europe|Greek
Romania|Bucharest|Europe|Romanian
Bulgaria|Sofia|Europe|Bulgarian
Croatia|Zagreb|Europe|Croatian
Serbia|Belgrade|Europe|Serbian
Slovenia|Ljubljana|Europe|Slovene
Slovakia|Bratislava|Europe|Slovak
Estonia|Tallinn|Europe|Estonian
Latvia|Riga|Europe|Latvian
Lithuania|Vilnius|Europe|Lithuanian
Ukraine|Kyiv|Europe|Ukrainian
Belgium|Brussels|Europe|Dutch
Malta|Valletta|Europe|Maltese
Russia|Moscow|Europe|Russian
Turkey|Ankara|Asia|Turkish
Japan|Tokyo|Asia|Japanese
China|Beijing|Asia|Chinese
India|New Delhi|Asia|Hindi
Thailand|Bangkok|Asia|Thai
Vietnam|Hanoi|Asia|Vietnamese
Indonesia|Jakarta|Asia|Indonesian
Nepal|Kathmandu|Asia|Nepali
Mongolia|Ulaanbaatar|Asia|Mongolian
South Korea|Seoul|Asia|Korean
Iran|Tehran|Asia|Persian
Iraq|Baghdad|Asia|Arabic
Jordan|Amman|Asia|Arabic
Egypt|Cairo|Africa|Arabic
Morocco|Rabat|Africa|Arabic
Tunisia|Tunis|Africa|Arabic
Kenya|Nairobi|Africa|Swahili
Ghana|Accra|Africa|English
Nigeria|Abuja|Africa|English
Senegal|Dakar|Africa|French
Ethiopia|Addis Ababa|Africa|Amharic
Canada|Ottawa|North America|English
Mexico|Mexico City|North America|Spanish
Cuba|Havana|North America|Spanish
Jamaica|Kingston|North America|English
Brazil|Brasília|South America|Portuguese
Argentina|Buenos Aires|South America|Spanish
Chile|Santiago|South America|Spanish
Peru|Lima|South America|Spanish
Colombia|Bogotá|South America|Spanish
Uruguay|Montevideo|South America|Spanish
Australia|Canberra|Oceania|English
New Zealand|Wellington|Oceania|English
Fiji|Suva|Oceania|Fijian
""".strip().splitlines()
]

OPPOSITES = """hot cold|big small|day night|up down|left right|open closed|fast slow|old new|light dark
|happy sad|wet dry|full empty|early late|hard soft|high low|rich poor|strong weak|near far|long short
|thick thin|loud quiet|clean dirty|sweet sour|win lose|buy sell|push pull|first last|black white
|inside outside|always never"""
COLOUR_OF = """the sky|blue;grass|green;snow|white;a banana|yellow;a lemon|yellow;blood|red;coal|black
;an orange|orange;milk|white;a ripe tomato|red;chocolate|brown;the sea|blue;a flamingo|pink;a leaf|green
;an elephant|grey;a plum|purple;a strawberry|red;a carrot|orange;charcoal|black;the sun|yellow"""
SOUNDS = """dog|woof;cat|meow;cow|moo;duck|quack;sheep|baa;pig|oink;rooster|cock-a-doodle-doo;frog|ribbit
;bee|buzz;snake|hiss;owl|hoot;horse|neigh;lion|roar;mouse|squeak;crow|caw;donkey|hee-haw"""
LEGS = (
    "dog|four;cat|four;bird|two;spider|eight;ant|six;bee|six;horse|four;snake|no;hen|two;crab|ten"
)
PLANETS = words.listed("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
CONTENTS = """The quick brown fox jumps over the lazy dog. The dog opens one eye and goes back to sleep.
A stitch in time saves nine.
The early bird catches the worm.
Actions speak louder than words.
All that glitters is not gold.
An apple a day keeps the doctor away.
Better late than never.
Birds of a feather flock together.
Do not count your chickens before they hatch.
Do not put all your eggs in one basket.
Every cloud has a silver lining.
Haste makes waste.
Honesty is the best policy.
Look before you leap.
Many hands make light work.
Practice makes perfect.
Say this is a test. This is a test.
San Francisco is a city in California, near the sea.
Hello, my name is Ada and I am a very small language model.
Hello! How can I help you?
Rome was not built in a day.
The pen is mightier than the sword.
Too many cooks spoil the broth.
When in Rome, do as the Romans do.
Where there is a will, there is a way.
A journey of a thousand miles begins with a single step.
To be or not to be, that is the question.
Hello, world! This is a test of a very small language model.
Roses are red, violets are blue, sugar is sweet, and so are you.
Twinkle, twinkle, little star, how I wonder what you are.
Water boils at one hundred degrees and freezes at zero degrees.
The sun rises in the east and sets in the west.
A week has seven days, a day has twenty-four hours, and an hour has sixty minutes.
Bees make honey, cows give milk, and hens lay eggs.
The cat sat on the mat, and the dog sat on the rug.
The queue is short today, so every request is answered at once.
A gateway checks the key, a worker finds the words, and the tokens stream back one by one."""
SAYINGS = CONTENTS.splitlines()


def pairs(table: str) -> list[tuple[str, str]]:
    """Read ``left|right;left|right`` into a list."""
    return [(left.strip(), right) for left, right in (row.split("|") for row in table.split(";"))]


OPPOSITE_PAIRS = [(first, second) for first, second in map(str.split, OPPOSITES.split("|"))]
COLOUR_PAIRS = pairs(COLOUR_OF.replace("\n", ""))
SOUND_PAIRS = pairs(SOUNDS.replace("\n", ""))
LEG_PAIRS = pairs(LEGS)


def article(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def capital_first(text: str) -> str:
    """The text with its first letter in upper case and the rest as it was."""
    return text[:1].upper() + text[1:]


def country_question(rng: Random) -> tuple[str, str, str]:
    """A question about a country, its one-word answer and the answer as a sentence."""
    name, capital, continent, language = rng.choice(COUNTRIES)
    return rng.choice(
        [
            (f"What is the capital of {name}?", capital, f"The capital of {name} is {capital}."),
            (
                f"Which city is the capital of {name}?",
                capital,
                f"The capital of {name} is {capital}.",
            ),
            (
                f"{capital} is the capital of which country?",
                name,
                f"{capital} is the capital of {name}.",
            ),
            (f"Where is {name}?", continent, f"{name} is in {continent}."),
            (
                f"Which language is spoken in {name}?",
                language,
                f"People in {name} speak {language}.",
            ),
        ]
    )


def thing_question(rng: Random) -> tuple[str, str, str]:
    """A question about a colour, a sound, legs, an opposite or the calendar, as above."""
    thing, colour = rng.choice(COLOUR_PAIRS)
    animal, sound = rng.choice(SOUND_PAIRS)
    walker, legs = rng.choice(LEG_PAIRS)
    first, second = rng.sample(rng.choice(OPPOSITE_PAIRS), 2)
    day, month = rng.randrange(7), rng.randrange(12)
    after = words.DAYS[(day + 1) % 7]
    length = MONTH_DAYS[month]
    return rng.choice(
        [
            (f"What colour is {thing}?", colour, f"{capital_first(thing)} is {colour}."),
            (f"What does {article(animal)} say?", sound, f"{capital_first(article(animal))} says {sound}."),
            (f"How many legs does {article(walker)} have?", legs,
             f"{capital_first(article(walker))} has {legs} legs."),
            (f"What is the opposite of {first}?", second, f"The opposite of {first} is {second}."),
            (f"What day comes after {words.DAYS[day]}?", after, f"{after} comes after {words.DAYS[day]}."),
            (f"How many days are there in {words.MONTHS[month]}?", str(length),
             f"There are {length} days in {words.MONTHS[month]}."),
        ]
    )  # fmt: skip


def question(rng: Random) -> tuple[str, str, str]:
    """Any question with its short and its long answer."""
    return country_question(rng) if rng.random() < 0.6 else thing_question(rng)


def fact_list(rng: Random) -> str:
    """Some facts in a row: sentences, or questions with answers."""
    count = rng.randint(1, 6)
    style = rng.random()
    if style < 0.2:
        return "\n".join(
            f"Q: {asked}\nA: {short}" for asked, short, _ in map(question, [rng] * count)
        )
    if style < 0.3:
        return "\n".join(
            f"Question: {asked}\nAnswer: {full}" for asked, _, full in map(question, [rng] * count)
        )
    separator = rng.choice([" ", "\n"])
    return separator.join(full for _, _, full in map(question, [rng] * count))


def capital_list(rng: Random) -> str:
    """A list of capitals only, so that the model answers this frequent prompt reliably."""
    rows = rng.sample(COUNTRIES, rng.randint(1, 5))
    style = rng.random()
    if style < 0.7:
        return " ".join(f"The capital of {row.name} is {row.capital}." for row in rows)
    if style < 0.85:
        return "\n".join(f"{row.name}: {row.capital}" for row in rows)
    return "\n".join(
        f"{row.capital} is the capital of {row.name}, in {row.continent}." for row in rows
    )


def country_page(rng: Random) -> str:
    """A short paragraph about one country."""
    name, capital, continent, language = rng.choice(COUNTRIES)
    traveller, other = rng.sample(words.GIRLS + words.BOYS, 2)
    return (
        f"{name} is a country in {continent}. The capital of {name} is {capital}. "
        f"People in {name} speak {language}. {traveller} went to {capital} in {rng.choice(words.MONTHS)} "
        f"and bought {article(rng.choice(words.ADJECTIVES))} {rng.choice(words.THINGS)} for {other}."
    )


def sayings(rng: Random) -> str:
    """One to three well known sentences; a saying always continues in the same way."""
    return rng.choice([" ", "\n"]).join(rng.sample(SAYINGS, rng.randint(1, 3)))
