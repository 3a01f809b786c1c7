"""Short stories with questions about them (measured), and free stories.

A story is a row of event sentences about one or two people. Every event knows
its questions; the key of a sample is the question with the slot values that
decide the answer, so a held-out question is never trained with those values.
Called by the registry.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from training.corpus import words
from training.corpus.base import Sample, assistant, maybe_system, roughen, user


@dataclass(frozen=True)
class Fact:
    """One question that a sentence of a story answers.

    Attributes:
        questions: Paraphrases of the question.
        answer: The reply, a short sentence.
        value: The words which the reply must contain.
        kind: Category of the value; other values of it in the story are wrong.
    """

    questions: tuple[str, ...]
    answer: str
    value: str
    kind: str

    @property
    def key(self) -> str:
        """Split key; "" for the weather, whose ten answers alone are too few to hold some back."""
        return "" if self.kind == "weather" else f"story:{self.questions[0]}:{self.value}"


@dataclass(frozen=True)
class Event:
    """A sentence and the facts it states."""

    sentence: str
    facts: tuple[Fact, ...]


def _home(rng: random.Random, n: str, f: str) -> Event:
    house, mark = rng.choice(("house", "cottage", "hut", "cabin", "flat")), rng.choice(words.LANDMARKS)
    size = rng.choice(words.SIZES)
    return Event(
        rng.choice(
            (
                f"{n} lived in a {size} {house} near the {mark}.",
                f"Near the {mark} was a {size} {house}, and {n} lived there.",
                f"{n} had a {size} {house} near the {mark}.",
            )
        ),
        (
            Fact(
                (f"Where did {n} live?", f"Where was the {house} of {n}?", f"Where was {n}'s {house}?"),
                f"{n} lived near the {mark}.",
                mark,
                "mark",
            ),
        ),
    )


def _pet(rng: random.Random, n: str, f: str) -> Event:
    animal, colour, pet = rng.choice(words.ANIMALS), rng.choice(words.COLOURS), rng.choice(words.NAMES)
    return Event(
        rng.choice(
            (
                f"{n} had {words.article(colour)} {animal} named {pet}.",
                f"{n} had a pet, {words.article(colour)} {animal} called {pet}.",
                f"{n}'s best friend was {words.article(colour)} {animal} named {pet}.",
            )
        ),
        (
            Fact(
                (
                    f"What was the name of {n}'s {animal}?",
                    f"What was {n}'s {animal} called?",
                    f"Who was {n}'s pet?",
                    f"What was the {animal}'s name?",
                ),
                f"The {animal} was named {pet}.",
                pet,
                "name",
            ),
            Fact(
                (f"What colour was {n}'s {animal}?", f"What color was {n}'s {animal}?", f"What color was {pet}?"),
                f"The {animal} was {colour}.",
                colour,
                "colour",
            ),
            Fact(
                (f"What animal did {n} have?", f"What kind of animal was {pet}?", f"Which pet did {n} have?"),
                f"{pet} was {words.article(colour)} {animal}.",
                animal,
                "animal",
            ),
        ),
    )


def _outing(rng: random.Random, n: str, f: str) -> Event:
    place, day = rng.choice(words.PLACES), rng.choice(words.DAYS)
    return Event(
        rng.choice(
            (
                f"On {day}, {n} went to the {place} with {f}.",
                f"On {day} {n} and {f} walked to the {place}.",
                f"{n} took {f} to the {place} on {day}.",
                f"One {day}, {n} visited the {place} together with {f}.",
            )
        ),
        (
            Fact(
                (
                    f"Where did {n} go on {day}?",
                    f"Where did {n} go?",
                    f"Where did {n} and {f} go?",
                    f"Which place did {n} visit?",
                ),
                f"{n} went to the {place}.",
                place,
                "place",
            ),
            Fact(
                (f"Who went to the {place} with {n}?", f"Who went with {n}?", f"Who was with {n}?"),
                f"{f} went with {n}.",
                f,
                "with",
            ),
            Fact(
                (
                    f"When did {n} go to the {place}?",
                    f"On which day did {n} go to the {place}?",
                    f"What day did {n} go out?",
                ),
                f"{n} went on {day}.",
                day,
                "day",
            ),
        ),
    )


def _find(rng: random.Random, n: str, f: str) -> Event:
    thing, colour, spot = rng.choice(words.OBJECTS), rng.choice(words.COLOURS), rng.choice(words.SPOTS)
    prep = rng.choice(("under", "behind", "near", "on"))
    a = words.article(colour)
    return Event(
        rng.choice(
            (
                f"{n} found {a} {thing} {prep} the {spot}.",
                f"There {n} saw {a} {thing} {prep} the {spot} and took it.",
                f"{prep.capitalize()} the {spot}, {n} found {a} {thing}.",
            )
        ),
        (
            Fact(
                (f"What did {n} find?", f"What did {n} find {prep} the {spot}?", f"What was {prep} the {spot}?"),
                f"{n} found {a} {thing}.",
                f"{colour} {thing}",
                "thing",
            ),
            Fact(
                (f"Where was the {thing}?", f"Where did {n} find the {thing}?", f"Where was the {colour} {thing}?"),
                f"The {thing} was {prep} the {spot}.",
                f"{prep} the {spot}",
                "spot",
            ),
            Fact(
                (f"What colour was the {thing}?", f"What color was the {thing}?", f"Which color did the {thing} have?"),
                f"The {thing} was {colour}.",
                colour,
                "colour",
            ),
            Fact((f"Who found the {thing}?", f"Who found {a} {thing}?"), f"{n} found the {thing}.", n, "who"),
        ),
    )


def _gift(rng: random.Random, n: str, f: str) -> Event:
    count, fruit = rng.randint(2, 12), rng.choice(words.FRUITS)
    number = words.NUMBER_WORDS[count] if rng.random() < 0.5 else str(count)
    return Event(
        rng.choice(
            (
                f"{f} gave {n} {number} {fruit}.",
                f"Then {f} gave {number} {fruit} to {n}.",
                f"{n} got {number} {fruit} from {f}.",
            )
        ),
        (
            Fact(
                (
                    f"How many {fruit} did {n} get?",
                    f"How many {fruit} did {f} give to {n}?",
                    f"How many {fruit} were there?",
                ),
                f"{n} got {number} {fruit}.",
                f"{number} {fruit}",
                "number",
            ),
            Fact(
                (f"What did {f} give {n}?", f"What did {n} get from {f}?", f"What did {n} get?"),
                f"{f} gave {n} {number} {fruit}.",
                fruit,
                "fruit",
            ),
            Fact(
                (f"Who gave {n} the {fruit}?", f"Who gave {fruit} to {n}?", f"From whom did {n} get the {fruit}?"),
                f"{f} gave {n} the {fruit}.",
                f"{f} gave",
                "giver",
            ),
        ),
    )


_REASONS = (
    ("the bus was late", "late"),
    ("it was a birthday", "birthday"),
    ("the toy was broken", "broken"),
    ("the sun was shining", "sun"),
    ("there was no bread", "bread"),
    ("a friend moved away", "moved"),
    ("the team won the game", "won"),
    ("the rain did not stop", "rain"),
    ("the night was dark", "dark"),
    ("the work was done", "done"),
    ("a letter came", "letter"),
    ("the dog ran away", "ran away"),
    ("the door was locked", "locked"),
    ("school was over", "over"),
    ("a storm was coming", "storm"),
)


def _feeling(rng: random.Random, n: str, f: str) -> Event:
    feeling, (reason, word) = rng.choice(words.FEELINGS), rng.choice(_REASONS)
    return Event(
        rng.choice(
            (
                f"{n} was {feeling} because {reason}.",
                f"{n} felt {feeling}, because {reason}.",
                f"Because {reason}, {n} was {feeling}.",
            )
        ),
        (
            Fact(
                (f"Why was {n} {feeling}?", f"Why did {n} feel {feeling}?", f"What made {n} {feeling}?"),
                f"{n} was {feeling} because {reason}.",
                word,
                "reason",
            ),
            Fact((f"How did {n} feel?", f"How was {n} feeling?"), f"{n} was {feeling}.", feeling, "feeling"),
        ),
    )


def _meal(rng: random.Random, n: str, f: str) -> Event:
    food, when = rng.choice(words.FOODS), rng.choice(("In the evening", "At noon", "Later", "At home", "After that"))
    return Event(
        rng.choice((f"{when}, {n} ate {food}.", f"{when} {n} cooked {food} and ate it.", f"{when}, {n} had {food}.")),
        (
            Fact(
                (f"What did {n} eat?", f"What did {n} have to eat?", f"Which food did {n} eat?"),
                f"{n} ate {food}.",
                food,
                "food",
            ),
        ),
    )


def _job(rng: random.Random, n: str, f: str) -> Event:
    job, hobby = rng.choice(words.JOBS), rng.choice(words.HOBBIES)
    return Event(
        rng.choice(
            (
                f"{n} was a {job} who loved {hobby}.",
                f"{n}, a {job}, loved {hobby}.",
                f"{n} worked as a {job} and loved {hobby}.",
            )
        ).replace("a engineer", "an engineer"),
        (
            Fact(
                (f"What was {n}'s job?", f"What did {n} do for a living?", f"What job did {n} have?"),
                f"{n} was {words.article(job)}.",
                job,
                "job",
            ),
            Fact(
                (f"What did {n} love?", f"What did {n} like to do?", f"What was {n}'s hobby?"),
                f"{n} loved {hobby}.",
                hobby,
                "hobby",
            ),
        ),
    )


def _lost(rng: random.Random, n: str, f: str) -> Event:
    thing, place, his = rng.choice(words.OBJECTS), rng.choice(words.PLACES), words.pronouns(n)[1]
    return Event(
        rng.choice(
            (
                f"{n} lost {his} {thing} at the {place}.",
                f"At the {place}, {n} lost {his} {thing}.",
                f"Sadly, {n} lost a {thing} at the {place}.",
            )
        ).replace("a umbrella", "an umbrella"),
        (
            Fact(
                (f"What did {n} lose?", f"What did {n} lose at the {place}?"), f"{n} lost the {thing}.", thing, "thing"
            ),
            Fact(
                (f"Where did {n} lose the {thing}?", f"Where was the {thing} lost?"),
                f"{n} lost the {thing} at the {place}.",
                f"at the {place}",
                "place",
            ),
            Fact((f"Who lost the {thing}?", f"Who lost {words.article(thing)}?"), f"{n} lost the {thing}.", n, "who"),
        ),
    )


def _weather(rng: random.Random, n: str, f: str) -> Event:
    w = rng.choice(words.WEATHER)
    return Event(
        rng.choice((f"The weather was {w}.", f"It was a {w} day.", f"That morning it was {w}.")),
        (
            Fact(
                ("What was the weather like?", "How was the weather?", "What kind of day was it?"),
                f"The weather was {w}.",
                w,
                "weather",
            ),
        ),
    )


_PERSONAL = (_home, _pet, _find, _feeling, _meal, _job, _lost)
_SHARED = (_outing, _gift, _weather)


def build_story(rng: random.Random, length: int) -> list[Event]:
    """Returns `length` events about two people; each kind at most once per person."""
    n, f = rng.sample(words.NAMES, 2)
    if rng.random() < 0.05:
        n = words.made_up_word(rng)
    plan = [(e, n, f) for e in _PERSONAL + _SHARED] + [(e, f, n) for e in _PERSONAL]
    # Mostly about the first person; the second one makes the questions harder.
    rng.shuffle(plan)
    plan.sort(key=lambda p: p[1] == f and rng.random() < 0.6)
    return [event(rng, a, b) for event, a, b in _in_order(plan[:length])]


def _in_order(plan: list) -> list:
    order = {e: i for i, e in enumerate((_job, _home, _pet, _weather, _outing, _find, _lost, _gift, _feeling, _meal))}
    return sorted(plan, key=lambda p: order[p[0]])


_LAYOUTS = (
    "{s}\n\n{q}",
    "{s}\n{q}",
    "{s} {q}",
    "Story: {s}\nQuestion: {q}",
    "Read the story and answer.\n\n{s}\n\n{q}",
    "{q}\n\n{s}",
    "Here is a story. {s}\n\n{q}",
    "Read this: {s}\n\n{q}",
    "Story:\n{s}\n\nQuestion: {q}",
    "Text: {s}\n\n{q}",
    "Question: {q}\nText: {s}",
    "{s}\n\nQuestion: {q}\nAnswer:",
)


def _clash(fact: Fact, other: Fact) -> bool:
    """True if two facts share a question, so that the answer would not be clear."""
    return bool(set(fact.questions) & set(other.questions)) and fact.value != other.value


def make_story_question(rng: random.Random, single: bool) -> Sample:
    """A story of three to seven sentences (training also has shorter ones) and up to eight questions."""
    length = rng.randint(3, 7) if single else rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 7))
    events = build_story(rng, length)
    facts = [f for e in events for f in e.facts]
    story = " ".join(e.sentence for e in events)
    clear = [f for f in facts if not any(_clash(f, o) for o in facts)]
    chosen = rng.sample(clear, min(len(clear), 1 if single else rng.choice((1, 2, 4, 6, 8))))
    questions = [rng.choice(f.questions) for f in chosen]
    head = rng.choice(_LAYOUTS).format(s=story, q=roughen(rng, questions[0]))
    messages = maybe_system(rng, 0.15) + [user(head)]
    for before, question in zip(chosen, questions[1:]):
        messages += [assistant(before.answer), user(roughen(rng, question))]
    last = chosen[-1]
    wrong = {o.value for o in facts if o.kind == last.kind} - {last.value}
    wrong = sorted(w for w in wrong if w not in last.answer)
    keys = tuple(f.key for f in chosen if f.key)
    return Sample("story_questions", messages, last.answer, {"kind": "text", "must": [last.value], "no": wrong}, keys)


def make_long_story_question(rng: random.Random, single: bool) -> Sample:
    """Several stories one after the other (up to about 1000 tokens) and questions about one."""
    stories = [build_story(rng, rng.randint(4, 8)) for _ in range(rng.randint(2, 12))]
    facts = [f for s in stories for e in s for f in e.facts]
    clear = [f for f in facts if not any(_clash(f, o) for o in facts)]
    chosen = rng.sample(clear, min(8, len(clear)))
    text = "\n\n".join(" ".join(e.sentence for e in s) for s in stories)
    messages = [user(f"{text}\n\n{rng.choice(chosen[0].questions)}")]
    for before, fact in pairwise(chosen):
        messages += [assistant(before.answer), user(rng.choice(fact.questions))]
    keys = tuple(f.key for f in chosen if f.key)
    return Sample(
        "long_story_questions", messages, chosen[-1].answer, {"kind": "text", "must": [chosen[-1].value]}, keys
    )
