"""Documents with text outside ASCII: accents, other scripts and emoji."""

from random import Random

from scripts.demo_model.corpus import words
from scripts.demo_model.corpus.facts import article

NATIVE_CAPITALS = dict(
    row.split("|")
    for row in """Tokyo|東京
Beijing|北京
Seoul|서울
Moscow|Москва
Athens|Αθήνα
Cairo|القاهرة
Kyiv|Київ
Sofia|София
Bangkok|กรุงเทพ
New Delhi|नई दिल्ली
Vienna|Wien
Prague|Praha
Lisbon|Lisboa
Warsaw|Warszawa
Copenhagen|København
Zurich|Zürich
Geneva|Genève
Hanoi|Hà Nội""".splitlines()
)
GREETINGS = dict(
    row.split("|")
    for row in """Japanese|こんにちは
Chinese|你好
Korean|안녕하세요
Russian|Привет
Greek|Γειά σου
French|Ça va ?
Spanish|¡Hola!
German|Grüß Gott
Polish|Dzień dobry
Hindi|नमस्ते
Thai|สวัสดี
Swedish|Hej då""".splitlines()
)
FIXED = """日本の首都は東京です。人口はとても多いです。
中国的首都是北京。我喜欢喝茶。
猫が好きです。犬も好きです。🐱🐶
Das Mädchen trinkt in Zürich einen heißen Kakao.
El niño comió una piña en el jardín.
Le garçon mange une crème brûlée au café.
Привет, мир! Как дела?
I love 🍕 and 🍣, but not ☕.
Happy birthday! 🎉🎂😀
Good night! 🌙⭐
Have a nice day! 😀🌞""".splitlines()
EMOJI_NAMES = dict(
    row.split("|")
    for row in """cat|🐱
dog|🐶
apple|🍎
rocket|🚀
star|⭐
moon|🌙
fire|🔥
party|🎉
smile|😀
book|📚
flower|🌸
fish|🐟
tree|🌳
heart|❤️""".splitlines()
)


def native_name(rng: Random) -> str:
    """The local name of a city, or a greeting."""
    if rng.random() < 0.6:
        city, native = rng.choice(sorted(NATIVE_CAPITALS.items()))
        return rng.choice(
            [f"In its own language, {city} is written {native}.", f"{city} = {native}"]
        )
    language, greeting = rng.choice(sorted(GREETINGS.items()))
    return f"Hello in {language} is {greeting}"


def emoji_line(rng: Random) -> str:
    """An emoji with its name, or several of them after a sentence."""
    if rng.random() < 0.5:
        name, sign = rng.choice(sorted(EMOJI_NAMES.items()))
        return f"The emoji for {name} is {sign}"
    signs = "".join(rng.sample(words.EMOJI, rng.randint(1, 4)))
    return f"{rng.choice(words.GIRLS)} is {rng.choice(words.FEELINGS)} today {signs}"


def accented_sentence(rng: Random) -> str:
    """An English sentence with a borrowed word."""
    name, word = (
        rng.choice(["Zoë", "Chloé", "Renée", "José", "Björn", "André"]),
        rng.choice(words.ACCENTED),
    )
    city = rng.choice(["Zürich", "Genève", "São Paulo", "Bogotá", "København", "Reykjavík"])
    return rng.choice(
        [
            f"{name} met a naïve {rng.choice(words.JOBS)} in a café in {city}.",
            f"The word {word} has an accent.",
            f"In {city}, {name} wrote a résumé and ate {article(rng.choice(words.ADJECTIVES))} crème brûlée.",
        ]
    )


def fixed_line(rng: Random) -> str:
    """One of the fixed lines alone."""
    return rng.choice(FIXED)


def world_text(rng: Random) -> str:
    """One to four such lines."""
    makers = [native_name, emoji_line, accented_sentence, fixed_line]
    return "\n".join(rng.choice(makers)(rng) for _ in range(rng.randint(1, 4)))
