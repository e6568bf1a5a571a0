"""The tasks of the demonstration model. Each function draws one user turn and the answer the model should give.

Every answer is a function of the question alone, so that exact match is a fair measure.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from . import phrases
from .chat import Message
from .facts import COUNTRIES, OTHER_CITIES, RELATIONS, Country, statement
from .words import invented

CITIES: tuple[str, ...] = tuple(dict.fromkeys([c.capital for c in COUNTRIES])) + OTHER_CITIES
CONDITIONS: tuple[str, ...] = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")


@dataclass
class Turn:
    """One exchange: a question, the reasoning (in thinking mode), and the answer messages."""

    user: str
    reasoning: str
    replies: list[Message]
    country: Country | None = None
    relation: str = ""
    is_sum: bool = False

    def messages(self, thinking: bool) -> list[Message]:
        """The turn as chat messages."""
        first = dict(self.replies[0], reasoning=self.reasoning) if thinking else self.replies[0]
        return [{"role": "user", "content": self.user}, first, *self.replies[1:]]


def say(text: str) -> list[Message]:
    """A plain answer."""
    return [{"role": "assistant", "content": text}]


def ask(rng: random.Random, kind: str, subject: str, held_out: bool = False) -> str:
    """A phrasing of the question, in training with random decorations."""
    if held_out:
        text = rng.choice(phrases.HELD_OUT[kind]).replace("{c}", subject)
        return text[0].upper() + text[1:]
    text = rng.choice(phrases.TRAINED[kind]).replace("{c}", subject)
    roll = rng.random()
    if roll < 0.75:
        text = text[0].upper() + text[1:]
    if roll > 0.95:
        text = text.rstrip("?.")
    if rng.random() < 0.12:
        text = rng.choice(phrases.PREFIXES) + text
    if rng.random() < 0.08:
        suffix = rng.choice(phrases.SUFFIXES)
        text = (text.rstrip("?.") if suffix[0] == "," else text) + suffix
    return text


def think_fact(country: Country, relation: str) -> str:
    """The short reasoning before a fact."""
    value = getattr(country, relation)
    return f"The user asks for the {relation} of {country.name}. It is {value}."


def fact(rng: random.Random, country: Country | None = None, relation: str = "", held_out: bool = False) -> Turn:
    """A question about one fact."""
    country = country or rng.choice(COUNTRIES)
    relation = relation or rng.choices(RELATIONS, (4, 3, 3, 3))[0]
    user = ask(rng, relation, country.name, held_out)
    return Turn(user, think_fact(country, relation), say(statement(country, relation)), country, relation)


def follow_up(rng: random.Random, last: Turn) -> Turn:
    """A question that needs the previous turn: another relation of its country, or its relation for another country."""
    assert last.country is not None
    if rng.random() < 0.6:
        country, relation = last.country, rng.choice([r for r in RELATIONS if r != last.relation])
        user = rng.choice(phrases.FOLLOW_UPS[relation])
    else:
        country, relation = rng.choice(COUNTRIES), last.relation
        user = rng.choice(phrases.SAME_QUESTION).replace("{c}", country.name)
    return Turn(user, think_fact(country, relation), say(statement(country, relation)), country, relation)


def reverse(rng: random.Random) -> Turn:
    """From a capital to its country."""
    country = rng.choice(COUNTRIES)
    user = rng.choice((
        "Which country has the capital {c}?", "{c} is the capital of which country?",
        "Of which country is {c} the capital?",
        "Where is {c}?", "In which country is {c}?", "What country is {c} in?", "Which country's capital is {c}?",
    )).replace("{c}", country.capital)  # fmt: skip
    if country.capital == country.name:
        user = f"Which country has the capital {country.capital}?"
    answer = f"{country.capital} is the capital of {country.name}."
    return Turn(
        user,
        f"The user asks for the country of {country.capital}. It is {country.name}.",
        say(answer),
        country,
        "capital",
    )


def json_object(rng: random.Random, country: Country | None = None, held_out: bool = False) -> Turn:
    """The facts about a country as a JSON object."""
    country = country or rng.choice(COUNTRIES)
    fields = list(RELATIONS)
    user = ask(rng, "json", country.name, held_out)
    if not held_out and rng.random() < 0.35:
        fields = sorted(rng.sample(RELATIONS, rng.choice((1, 2))), key=RELATIONS.index)
        wanted = " and ".join(fields)
        user = rng.choice((
            "Give me the {f} of {c} as JSON.", "Write the {f} of {c} as a JSON object.", "{f} of {c} in JSON",
            "What is the {f} of {c}? Answer in JSON.", "JSON with the {f} of {c}, please.",
            "Return the {f} of {c} as JSON.",
        )).replace("{f}", wanted).replace("{c}", country.name)  # fmt: skip
    answer = json.dumps({"country": country.title, **{f: getattr(country, f) for f in fields}}, ensure_ascii=False)
    return Turn(user, f"The user wants JSON about {country.name}.", say(answer), country, fields[0])


def about(rng: random.Random, country: Country | None = None, held_out: bool = False) -> Turn:
    """A short paragraph about a country."""
    country = country or rng.choice(COUNTRIES)
    answer = (
        f"{country.at_start} is a country in {country.continent}. Its capital is {country.capital}. "
        f"Its currency is the {country.currency}. Its official language is {country.language}."
    )
    user = ask(rng, "about", country.name, held_out)
    return Turn(user, f"The user wants to learn about {country.name}.", say(answer), country, "continent")


def counting(rng: random.Random) -> Turn:
    """Numbers in order: an answer of any length."""
    start = rng.randint(1, 80)
    stop = start + rng.randint(2, rng.choice((8, 12, 30)))
    if rng.random() < 0.4:
        start, stop = 1, stop - start + 1
    user = rng.choice(
        (
            "Count from {a} to {b}.",
            "Please count from {a} to {b}.",
            "Count {a} to {b}",
            "Write the numbers from {a} to {b}.",
        )
    )
    user = user.replace("{a}", str(start)).replace("{b}", str(stop))
    numbers = ", ".join(str(n) for n in range(start, stop + 1))
    return Turn(user, f"The user wants the numbers from {start} to {stop}.", say(numbers + "."))


def small_talk(rng: random.Random) -> Turn:
    """Greetings and questions about the model."""
    asked, answer = rng.choices(phrases.SMALL_TALK, (4, 4, 2, 1, 1, 2, 1))[0]
    return Turn(rng.choice(asked), "This is small talk.", say(answer))


def copying(rng: random.Random) -> Turn:
    """Repeats words, names or invented words: teaches copying token by token, especially in long lists."""
    drawn = rng.random()
    names = [
        invented(rng) if rng.random() < drawn else rng.choice(
            (rng.choice(CITIES), rng.choice(COUNTRIES).title, rng.choice(COUNTRIES).currency, str(rng.randint(1, 9999)))
        )
        for _ in range(rng.choice((1, 2, 3, 4, 10, 20)))
    ]  # fmt: skip
    text = rng.choice((", ", ", ", "_", " ")).join(names)
    user = rng.choice(("Repeat: {t}", "Say {t}.", "Repeat after me: {t}", "Write {t}.")).replace("{t}", text)
    return Turn(user, "The user wants me to repeat it.", say(text))
