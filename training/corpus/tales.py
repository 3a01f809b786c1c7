"""Free story writing ("Tell me a short story about a fox"). Called by the registry.

Tales are made of a small plot grammar: a hero, a place, a wish or a trouble, a
helper and an ending that fits the trouble.
"""

from __future__ import annotations

import random

from training.corpus import words
from training.corpus.base import Sample, maybe_system, roughen, user

_ASK = (
    "Tell me a short story about {h}.",
    "Write a short story about {h}.",
    "Tell me a story about {h}",
    "A story about {h}, please.",
    "Can you tell me a story about {h}?",
    "Write a little tale about {h}.",
    "I want to hear a story about {h}.",
    "story about {h}",
)
_ASK_ANY = (
    "Tell me a story.",
    "Tell me a short story.",
    "Write a story",
    "Can you tell me a story?",
    "I want to hear a story.",
)
# (trouble, what the helper does, what everyone learns)
_PLOTS = (
    ("could not find the way home", "showed the way", "a friend can be a map"),
    ("was very hungry", "shared some {food}", "sharing makes everyone full"),
    ("had lost a {colour} {thing}", "looked under the {spot} and found it", "two see more than one"),
    ("was afraid of the dark", "brought a small candle", "a little light goes a long way"),
    ("wanted to cross the river", "built a small bridge", "work is lighter together"),
    ("felt very lonely", "sat down and told a joke", "a kind word helps"),
    ("was stuck under the {spot}", "pulled and pulled until it was over", "it is good to ask for help"),
    ("wanted to learn {hobby}", "practiced every day too", "practice makes you better"),
    ("was too tired to walk", "carried all the bags", "rest is not a shame"),
    ("was cold in the snow", "lent a warm {colour} blanket", "warm hearts are better than warm coats"),
)
_TRAITS = ["brave", "shy", "clever", "kind", "lazy", "curious", "funny", "gentle", "quiet", "cheerful"]


def tale(rng: random.Random, hero: str, name: str) -> str:
    """Writes a story of five to seven sentences about `hero` (a noun) called `name`."""
    helper = rng.choice([w for w in words.WILD if w != hero])
    place, landmark = rng.choice(words.PLACES), rng.choice(words.LANDMARKS)
    trouble, help_, moral = rng.choice(_PLOTS)
    slots = {
        "food": rng.choice(words.FOODS),
        "colour": rng.choice(words.COLOURS),
        "thing": rng.choice(words.OBJECTS),
        "spot": rng.choice(words.SPOTS),
        "hobby": rng.choice(words.HOBBIES),
    }
    trouble, help_ = trouble.format(**slots), help_.format(**slots)
    trait, day = rng.choice(_TRAITS), rng.choice(("One day", "One morning", "One evening", "One cold night"))
    lines = [
        rng.choice(
            (
                f"Once there was {words.article(trait)} {hero} named {name}.",
                f"Once upon a time, {words.article(trait)} {hero} called {name} lived near the {landmark}.",
                f"{name} was {words.article(trait)} {hero}.",
            )
        ),
        rng.choice(
            (
                f"Every day {name} played in the {place}.",
                f"{name} loved the {place}.",
                f"The {hero} liked to go to the {place}.",
            )
        ),
        f"{day}, {name} {trouble}.",
        rng.choice(
            (
                f"Then {words.article(helper)} came along.",
                f"Luckily, {words.article(helper)} was near.",
                f"{words.article(helper).capitalize()} heard about it.",
            )
        ),
        rng.choice(
            (
                f'"I will help you," said the {helper}.',
                f'"Do not worry," said the {helper}.',
                f'"Let me see," said the {helper}.',
            )
        ),
        f"The {helper} {help_}.",
        rng.choice(
            (f"{name} was happy and said thank you.", f"{name} smiled.", f"So {name} and the {helper} became friends.")
        ),
        rng.choice(
            (f"They learned that {moral}.", f"And {name} learned that {moral}.", "And they were friends ever after.")
        ),
    ]
    if rng.random() < 0.3:
        del lines[1]
    return " ".join(lines)


def make_tale(rng: random.Random, single: bool) -> Sample:
    """A request for a story and a tale about the wished-for hero."""
    hero, name = rng.choice(words.WILD), rng.choice(words.NAMES)
    r = rng.random()
    if r < 0.15 and not single:
        ask = rng.choice(_ASK_ANY)
    elif r < 0.4:
        ask = rng.choice(_ASK).format(h=f"{words.article(hero)} named {name}")
    else:
        who = rng.choice((words.article(hero), words.article(hero), f"{words.article(rng.choice(_TRAITS))} {hero}"))
        ask = rng.choice(_ASK).format(h=who)
    return Sample(
        "tales",
        maybe_system(rng) + [user(roughen(rng, ask))],
        tale(rng, hero, name),
        {"kind": "text", "must": [hero]},
        (f"tale:{ask}",),
    )
