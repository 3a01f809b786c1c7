"""Word lists from which the corpus is filled. Used by every task module.

Plain constants; nothing here has state. Lists are kept small enough for a
tiny model to meet each word often.
"""

from __future__ import annotations

import random


def _split(text: str) -> list[str]:
    """Splits a text into its words."""
    return text.split()


NAMES = _split("""
    Anna Ben Clara David Emma Finn Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa Sam Tara Uma
    Victor Wendy Xavier Yara Zoe Adam Bella Carl Dora Eric Fiona George Hanna Ivan Julia Kevin Lucy Max Nina Oscar
    Petra Ralf Sara Tom Ursula Vera Will Alice Bruno Cleo Daniel Elena Felix Gina Hugo Ida Jonas Kira Lena Marco
    Nora Otto Pia Rita Simon Theo Viola Wanda Amir Lin Omar Priya Ravi Mei Kofi Aisha Diego Lola""")
FEMALE = frozenset(
    _split("""
    Anna Clara Emma Grace Iris Kate Mia Olivia Rosa Tara Uma Wendy Yara Zoe Bella Dora Fiona Hanna Julia Lucy Nina
    Petra Sara Ursula Vera Alice Cleo Elena Gina Ida Kira Lena Nora Pia Rita Viola Wanda Priya Mei Aisha Lola""")
)
SURNAMES = _split("""
    Smith Brown Miller Davis Wilson Moore Taylor White Harris Clark Lewis Young King Wright Hill Green Baker Adams
    Carter Parker Cook Bell Ward Gray Wood Stone Fisher Hunter Mason Berg Lang Weber Rossi Silva Garcia Kim Chen
    Patel""")
CITIES = _split("""
    Paris London Berlin Madrid Rome Vienna Prague Oslo Dublin Lisbon Athens Warsaw Zurich Munich Hamburg Boston
    Chicago Denver Seattle Dallas Austin Toronto Tokyo Kyoto Delhi Mumbai Cairo Lagos Nairobi Sydney Lima Bogota
    Geneva Milan Venice Porto Seville Lyon Bristol Leeds York Oxford Bergen Turin Naples Krakow Riga Miami Havana
    Seoul""")
COLOURS = _split("red blue green yellow white black brown gray pink purple orange golden silver")
ANIMALS = _split("""
    dog cat rabbit horse goat duck mouse hamster parrot turtle pony lamb fox owl bear frog pig hen goose donkey""")
WILD = _split("""
    fox bear owl rabbit mouse wolf deer frog hedgehog squirrel lion tiger elephant turtle dragon bird fish cat dog
    duck pig sheep cow horse monkey penguin whale bee snail crow""")
OBJECTS = _split("""
    kite ball book key lamp ring coin hat box map bell cup drum boat rope basket shell button scarf mirror bottle
    clock doll letter pencil spoon stone flute bag umbrella ladder blanket candle bracelet whistle card hammer
    bucket watch chair""")
FOODS = _split("""
    bread soup cake rice cheese pasta pizza salad fish pie stew pancakes eggs toast beans noodles""")
FRUITS = _split("""
    apples pears plums cherries oranges lemons bananas peaches grapes berries nuts figs melons carrots tomatoes
    potatoes onions mushrooms cookies candies""")
GOODS = _split("""
    lamp chair table pen book shirt clock bag bottle phone pillow mug knife brush towel mirror basket blanket candle
    plate desk radio camera hammer ladder shovel bucket helmet jacket printer cable keyboard mouse screen""")
PLACES = _split("""
    park forest beach market school library lake garden farm zoo museum river station castle village harbor
    playground mountain bakery theater meadow hospital church field""")
LANDMARKS = _split("""
    river forest lake mill bridge harbor mountain church market school castle station beach meadow well""")
SPOTS = _split("tree bench bridge table rock bush fence chair bed stairs cart wall box rug")
JOBS = _split("""
    teacher baker farmer doctor nurse pilot painter singer writer gardener carpenter fisher tailor cook driver
    sailor miner clerk judge engineer dentist plumber""")
DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _split("January February March April May June July August September October November December")
WEATHER = _split("sunny rainy windy cloudy snowy foggy stormy warm cold hot")
FEELINGS = _split("happy sad angry tired proud scared bored excited lonely nervous")
HOBBIES = _split("""
    swimming painting reading dancing singing cooking fishing running chess football tennis knitting hiking""")
NUMBER_WORDS = _split("zero one two three four five six seven eight nine ten eleven twelve")
SIZES = _split("small big little large tiny huge old new pretty strange shiny")

_ONSETS = _split("b br c ch d dr f g gr h j k l m n p r s st t th tr v w z")
_VOWELS = _split("a e i o u ai ea oo")
_CODAS = ["", "", "n", "r", "l", "s", "m", "k", "th", "x"]


def made_up_word(rng: random.Random) -> str:
    """Returns an invented capitalised word of two or three syllables."""
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))]
    return ("".join(parts) + rng.choice(_CODAS)).capitalize()


def person(rng: random.Random, odd: float = 0.06) -> str:
    """Returns a first name; with probability `odd` an invented one."""
    return made_up_word(rng) if rng.random() < odd else rng.choice(NAMES)


def city(rng: random.Random, odd: float = 0.04) -> str:
    """Returns a city; with probability `odd` an invented one."""
    return made_up_word(rng) if rng.random() < odd else rng.choice(CITIES)


def article(noun: str) -> str:
    """Puts "a" or "an" before a noun phrase."""
    return ("an " if noun[0].lower() in "aeiou" and not noun.startswith("uni") else "a ") + noun


def pronouns(name: str) -> tuple[str, str]:
    """Returns ("she", "her"), ("he", "his") or, for invented names, ("they", "their")."""
    if name in FEMALE:
        return "she", "her"
    return ("he", "his") if name in NAMES else ("they", "their")


def join_and(items: list[str]) -> str:
    """Joins words as "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
