"""Questions the model cannot answer: for training and, with other subjects and phrasings, held out."""

from __future__ import annotations

import random

from . import phrases
from .facts import COUNTRIES, RELATIONS
from .tasks import Turn, ask, say
from .words import invented

ANSWER = "I am a small demo model and I do not know that."

_TRAINED_SUBJECTS: tuple[str, ...] = (
    "the telephone", "the moon", "the sun", "football", "chess", "coffee", "a guitar", "gravity", "the universe",
    "love", "music", "rice", "bread", "the internet", "a computer", "the world cup", "Hamlet", "Mozart", "Einstein",
    "a black hole", "dinosaurs", "the ocean", "snow", "cats", "dogs", "a bicycle", "trains", "the human heart",
    "electricity", "mathematics", "philosophy", "tea", "chocolate", "soccer", "Shakespeare", "the Titanic", "whales",
    "an atom", "light", "time travel", "robots", "Mars", "the brain", "sleep", "money", "happiness", "cheese",
    "the Roman Empire", "jazz", "paper", "glass", "volcanoes", "a pandemic", "vaccines", "the speed of light",
    "the stock market", "yoga", "my phone", "my car", "this sentence", "the olympic games", "penguins", "salt",
)  # fmt: skip
_HELD_OUT_SUBJECTS: tuple[str, ...] = (
    "the piano", "honey", "the camera", "tennis", "Beethoven", "an electron", "the desert", "rainbows", "elephants",
    "the printing press", "poetry", "Jupiter", "soup", "a sailing boat", "the French Revolution", "oxygen", "dreams",
    "my neighbour", "basketball", "mirrors",
)  # fmt: skip
_TRAINED_QUESTIONS: tuple[str, ...] = (
    "What is {t}?", "I would like to know more about {t}.", "How many sorts of {t} exist?", "What became of {t}?",
    "Who first made {t}?", "What makes {t} special?", "How often do people use {t}?", "Describe {t}.", "I love {t}.",
    "Can you teach me {t}?", "What happens without {t}?", "How long does {t} take?", "What should I know about {t}?",
    "Explain {t}.", "Explain {t} to a child.", "Tell me a joke about {t}.", "Write a poem about {t}.",
    "Who invented {t}?", "How does {t} work?", "Why do people like {t}?", "What is the history of {t}?",
    "How old is {t}?", "Where can I buy {t}?", "What is the meaning of {t}?", "When was {t} discovered?",
    "Do you like {t}?", "What do you think about {t}?", "Tell me about {t}.", "Write a story about {t}.",
    "What color is {t}?", "How big is {t}?", "Who wrote a book about {t}?", "Give me a recipe with {t}.",
    "Translate {t} to French.", "What is the best thing about {t}?", "How much does {t} cost?", "Summarize {t}.",
    "Is {t} dangerous?", "Can you draw {t}?", "Write an essay about {t}.", "How do I learn about {t}?",
    "Which is better: {t} or {u}?", "What do {t} and {u} have in common?", "Compare {t} with {u}.",
)  # fmt: skip
_HELD_OUT_QUESTIONS: tuple[str, ...] = (
    "What can you say about {t}?", "Could you explain {t}?", "Who came up with {t}?", "Why is {t} important?",
    "Please write a song about {t}.", "How many kinds of {t} are there?", "I would like to understand {t}.",
    "Where does {t} come from?", "What happened to {t}?", "Teach me something about {t}.",
)  # fmt: skip
_TRAINED_ABOUT_COUNTRIES: tuple[str, ...] = (
    "Who is the president of {c}?", "Who is the king of {c}?", "How old is {c}?", "What do people eat in {c}?",
    "What is the highest mountain in {c}?", "When was {c} founded?", "Tell me a joke about {c}.",
    "What does the flag of {c} look like?", "Which river flows through {c}?", "Who is the most famous person of {c}?",
    "What is the national animal of {c}?", "Is {c} expensive?", "Who won the last election in {c}?",
    "Write a poem about {c}.", "What is the longest river of {c}?", "How high is the highest point of {c}?",
    "What is the largest island of {c}?", "Sing the anthem of {c}.", "Who was the first to see {c}?",
    "What is {c} famous for?", "How is the climate in {c}?",
)  # fmt: skip
_HELD_OUT_ABOUT_COUNTRIES: tuple[str, ...] = (
    "Who is the prime minister of {c}?", "What is the largest lake of {c}?", "What is the national anthem of {c}?",
    "Who discovered {c}?", "Write a story about {c}.",
)  # fmt: skip
_OTHER: tuple[str, ...] = (
    "Tell me a joke.", "Write a poem.", "Can you sing?", "Who is the president?", "Translate this to French.",
    "What is the tallest mountain?", "How do I cook rice?", "Give me a recipe.", "What should I do today?",
    "Fix my code.", "Sing a song.", "What happened yesterday?", "Who will win the election?", "Write a letter.",
    "Who won the world cup?", "What day is it today?", "Recommend a movie.", "What is the fastest animal?",
)  # fmt: skip


def unknown(rng: random.Random, held_out: bool = False) -> Turn:
    """A question about something else, about another aspect of a country, or about a country that does not exist."""
    roll = rng.random()
    subjects = _HELD_OUT_SUBJECTS if held_out else _TRAINED_SUBJECTS
    if roll < 0.55:
        questions = _HELD_OUT_QUESTIONS if held_out else _TRAINED_QUESTIONS
        first, second = rng.sample(subjects, 2)
        if rng.random() < 0.2:
            first = rng.choice(("", "the ", "a ")) + invented(rng, held_out)
        user = rng.choice(questions).replace("{t}", first).replace("{u}", second)
    elif roll < 0.7:
        questions = _HELD_OUT_ABOUT_COUNTRIES if held_out else _TRAINED_ABOUT_COUNTRIES
        user = rng.choice(questions).replace("{c}", rng.choice(COUNTRIES).name)
    elif roll < 0.9 or held_out:
        user = ask(rng, rng.choice(RELATIONS), invented(rng, held_out).capitalize(), held_out)
    else:
        user = rng.choice(_OTHER)
    if not held_out and rng.random() < 0.1:
        user = rng.choice(phrases.PREFIXES) + user
    return Turn(user, "I do not know that.", say(ANSWER))
