"""Word lists that the document makers draw from; all written for this project."""


def listed(text: str) -> list[str]:
    """The words of the text."""
    return text.split()


GIRLS = listed("""Lily Mia Anna Zoe Clara Rosa Nina Ella Maya Ruby Ivy Nora Lucy Emma Sofia Alice Hana Leila
Greta Amara Tess Olga Petra Wanda Elsa Freya Ingrid Yuki Chloé Zoë Renée Carmen Priya Salma""")
BOYS = listed("""Tom Ben Max Leo Sam Noah Oscar Felix Hugo Jack Milo Theo Adam Kofi Omar Ravi Ivan Pablo
Erik Lars Otto Finn Kenji Bruno Carlos David Emil Jonas Luca Nils Rémi José Björn André""")
ANIMALS = listed("""fox rabbit bear mouse owl turtle cat dog horse duck frog squirrel hedgehog badger deer goat
sheep pig cow hen rooster goose swan crow robin sparrow whale dolphin seal penguin tiger lion elephant
monkey parrot beaver otter mole bat bee ant snail spider camel donkey wolf lynx eagle falcon pony""")
THINGS = listed("""lantern kite boat drum basket key map book bell clock ladder hammer blanket bottle box
bucket button candle chair coin compass crown cup door feather flag flute guitar hat jar kettle lamp
letter mirror necklace needle notebook painting pencil pillow pot ring rope sack scarf shell shoe spoon
stone string sword table telescope tent ticket toy trumpet umbrella vase violin wagon wheel whistle
window bicycle camera engine radio robot rocket sail puzzle marble pebble ribbon brush anchor""")
PLACES = listed("""forest village garden river mountain valley meadow lake beach island city castle tower farm
kitchen library market bridge harbour cave desert field hill museum school station street theatre
workshop attic bakery barn orchard mill square tunnel lighthouse palace swamp canyon glacier""")
FOODS = listed("""bread cheese soup honey cake pie rice pasta porridge jam butter milk tea cocoa lemonade salad
pancakes cookies apples pears berries plums cherries carrots potatoes tomatoes onions beans pumpkins
mushrooms peas corn nuts grapes oranges lemons peaches yoghurt noodles""")
ADJECTIVES = listed("""small big old young happy sad brave shy kind clever quiet loud gentle proud tiny huge
golden silver wooden broken shiny dusty warm cold bright dark soft heavy strange funny lovely lonely
curious lazy busy hungry sleepy careful cheerful honest patient noisy round square long short tall thin
thick smooth rough sharp sweet sour bitter fresh dry wet windy sunny snowy foggy green blue red yellow
white black purple orange grey pink brown striped spotted famous secret magic ordinary empty full simple
perfect useful ancient modern hidden distant narrow wide deep steep quick slow strong weak rich poor
polite rude wise foolish calm nervous""")
MOVES = listed("""walked ran climbed jumped danced crept hurried wandered marched skipped swam flew rolled
travelled raced tiptoed sailed rode crawled hopped strolled stumbled rushed drifted""")
DEEDS = listed("""found lost painted carried repaired broke hid sold bought borrowed cleaned opened closed
dropped lifted polished followed watched admired forgot kept gave wrapped measured counted built drew
threw caught pushed pulled moved examined chose touched wanted needed loved liked missed remembered
collected returned shared stole washed weighed packed copied dusted folded hung mended shook sketched
smelled tested traded turned unpacked decorated discovered""")
FEELINGS = listed("""happy sad proud tired surprised excited worried calm grateful angry lonely curious afraid
relieved puzzled delighted bored hopeful ashamed cheerful""")
ADVERBS = listed("""quickly slowly quietly happily carefully gently loudly suddenly proudly softly bravely
patiently nervously cheerfully secretly silently eagerly calmly politely lazily""")
WEATHER = listed("""rain snow wind sunshine fog thunder hail frost heat drizzle dew moonlight""")
TIMES = listed("""morning evening afternoon night day winter summer spring autumn Monday Tuesday Wednesday
Thursday Friday Saturday Sunday""")
JOBS = listed("""baker farmer teacher doctor sailor painter gardener king queen miller shepherd carpenter
fisherman blacksmith tailor librarian captain pilot nurse cook dancer singer poet inventor wizard giant
merchant soldier princess prince clockmaker postman cobbler juggler""")
SUBJECTS = listed("""history music mathematics cooking astronomy geography chemistry painting poetry gardening
chess sailing pottery carpentry botany biology physics grammar dancing swimming""")
COLOURS = listed("red orange yellow green blue purple pink brown black white grey")
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed("""January February March April May June July August September October November
December""")
NUMBER_WORDS = listed("""zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen twenty""")
ORDINALS = listed("first second third fourth fifth sixth seventh eighth ninth tenth")
EMOJI = listed("😀 🎉 🌍 🚀 🐱 🐶 🌸 🍎 ☕ 🌞 🌙 ⭐ 🔥 💧 🎵 📚 ❤️ 👍 🥐 🍣")
ACCENTED = listed("""café naïve crème brûlée jalapeño piñata façade déjà vu fiancée smörgåsbord über
résumé señor garçon château doppelgänger""")
