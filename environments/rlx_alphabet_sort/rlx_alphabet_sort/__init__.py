"""Sort words, turn after turn: each turn brings new words, and the answer is the whole list so far in alphabetical order.

The reward is the share of turns whose list is right. A row is `question` (the first turn), `answer` (its sorted list) and `info`
(`turns`: the words of each turn). Words are first names, or with `letters` single letters, which a character model can sort:

    user d b · assistant b d · user a · assistant a b d

A quarter of all first turns, the same for every seed, is held out for evaluation: no dialogue to train on begins with these words, in any
order.
"""

from __future__ import annotations

import difflib
import random
import re
import string
import zlib
from collections.abc import Iterator
from typing import Any

import verifiers as vf
from datasets import Dataset

SYSTEM_PROMPT = (
    "Sort words alphabetically. In each turn you get words; answer with all words of all turns so far in alphabetical order, separated by "
    "spaces, between <sorted> and </sorted>, and nothing else."
)
_TEXT = """
Ada Adam Agnes Alan Albert Alice Amir Amy Andrea Anna Arthur Asha Bella Ben Bianca Boris Bruno Carl Carmen Cecil Clara Colin Dana Daniel
Daria David Dora Edgar Edith Elena Elias Emil Emma Eric Esther Eva Felix Fiona Flora Frank Freya Gabriel George Gina Grace Greta Hanna
Harold Hector Helen Hugo Ian Ida Igor Irene Iris Ivan Jack Jana Jasper Jonas Julia Karl Kate Kevin Klara Kofi Laura Lena Leo Lily Linus
Louis Lucy Luke Maria Mark Martha Max Mila Mina Moritz Nadia Nina Noah Nora Olaf Olga Oscar Otto Paul Pedro Petra Philip Quinn Rachel
Ravi Rita Robert Rosa Ruth Samuel Sara Simon Sofia Stella Tara Theo Thomas Tina Ulrich Uma Vera Victor Viola Walter Wanda Yara Yusuf Zoe
"""
NAMES = tuple(_TEXT.split())
EVAL_SEED = 1_000_003  # added to the seed for the evaluation dialogues
OTHERS_SEED = 3_000_017  # and for the dialogues that take the places of held-out ones
HELD_OUT = 4  # one in so many first turns
GIVE_UP = 10_000  # draws in a row without a new dialogue, after which there are no more
_TAG = re.compile(r"<(/?)sorted>", re.IGNORECASE)


def _tagged(text: str) -> str | None:
    """What the last pair of tags holds; None without one. Looks at each tag once: a model may write thousands that never end."""
    start, found = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            found, start = text[start : tag.start()], None
    return found


def read_words(text: str) -> list[str]:
    """The words of a reply: what the last tags hold, or the whole reply, in lower case."""
    text = text.rpartition("</think>")[2]
    tagged = _tagged(text)
    return re.findall(r"[a-z]+", (text if tagged is None else tagged).lower())


def ordered(turns: list[list[str]]) -> list[str]:
    """All words of these turns in alphabetical order, in lower case."""
    return sorted(word.lower() for words in turns for word in words)


class AlphabetSort(vf.MultiTurnEnv):
    """The dialogue. Every row has its own number of turns."""

    def __init__(self, letters: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.letters = letters

    def right(self, state: vf.State) -> list[bool]:
        """For each answer so far, whether the list is right."""
        turns = state["info"]["turns"]
        return [
            read_words(str(step["completion"][-1].content or "")) == ordered(turns[: number + 1])
            for number, step in enumerate(state["trajectory"])
        ]

    @vf.stop
    async def all_turns_played(self, state: vf.State) -> bool:
        return len(state["trajectory"]) >= len(state["info"]["turns"])

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        return [vf.UserMessage(role="user", content=" ".join(state["info"]["turns"][len(state["trajectory"])]))]

    def answer_to(self, words: list[str]) -> str:
        """A right answer as the model would write it."""
        text = " ".join(sorted(words, key=str.lower))
        return text if self.letters else f"<sorted>{text}</sorted>"

    def demonstration(self, row: dict[str, Any], errs: bool, random: random.Random) -> list[dict[str, Any]]:
        """Sorted lists. A teacher that errs exchanges two neighbours in each."""
        said: list[dict[str, Any]] = []
        known: list[str] = []
        for words in row["info"]["turns"]:
            if said:
                said.append({"role": "user", "content": " ".join(words)})
            known += words
            text = self.answer_to(known)
            if errs:
                mixed = sorted(known, key=str.lower)
                at = random.randrange(len(mixed) - 1)
                mixed[at : at + 2] = reversed(mixed[at : at + 2])
                text = text.replace(" ".join(sorted(known, key=str.lower)), " ".join(mixed))
            said.append({"role": "assistant", "content": text})
        return said


def build_rows(letters: bool, turns: tuple[int, int], words: tuple[int, int], num_examples: int, seed: int) -> list[dict[str, Any]]:
    """`num_examples` rows to train on. No word occurs twice in a row; the same seed gives the same rows.

    Another dialogue takes the place of one that is held out, so the rows around it do not depend on what is held out.
    """
    drawn, others = _dialogues(letters, turns, words, seed), _dialogues(letters, turns, words, seed + OTHERS_SEED)
    rows = []
    for _ in range(num_examples):
        lists = next(drawn)
        while is_held_out(lists):
            lists = next(others)
        rows.append(_row(lists))
    return rows


def build_eval_rows(letters: bool, turns: tuple[int, int], words: tuple[int, int], num_examples: int, seed: int) -> list[dict[str, Any]]:
    """At most `num_examples` different held-out rows, in an order that follows from the seed."""
    found: list[list[list[str]]] = []
    misses = 0
    for lists in _dialogues(letters, turns, words, seed):
        if len(found) == num_examples or misses == GIVE_UP:
            break
        misses = misses + 1 if not is_held_out(lists) or lists in found else 0
        if misses == 0:
            found.append(lists)
    return [_row(lists) for lists in found]


def is_held_out(turns: list[list[str]]) -> bool:
    """Whether a dialogue is for evaluation. It depends on the words of its first turn, in any order: every prompt begins with them."""
    return zlib.crc32(" ".join(ordered(turns[:1])).encode()) % HELD_OUT == 0


def _dialogues(letters: bool, turns: tuple[int, int], words: tuple[int, int], seed: int) -> Iterator[list[list[str]]]:
    """Endless dialogues: the words of each turn."""
    rng = random.Random(seed)
    pool = string.ascii_lowercase if letters else NAMES
    while True:
        counts = [rng.randint(*words) for _ in range(rng.randint(*turns))]
        drawn = rng.sample(pool, sum(counts))
        yield [[drawn.pop() for _ in range(count)] for count in counts]


def _row(turns: list[list[str]]) -> dict[str, Any]:
    return {"question": " ".join(turns[0]), "answer": " ".join(sorted(turns[0], key=str.lower)), "info": {"turns": turns}}


def load_environment(
    letters: bool = False,
    min_turns: int = 1,
    max_turns: int = 3,
    min_words: int = 2,
    max_words: int = 4,
    num_examples: int = 4096,
    num_eval_examples: int = 256,
    seed: int = 0,
) -> vf.MultiTurnEnv:
    """The environment.

    Args:
        letters: sort single letters, without a system prompt; false: first names.
        min_turns: fewest turns.
        max_turns: most turns.
        min_words: fewest words that a turn brings.
        max_words: most words that a turn brings.
        num_examples: dialogues to train on.
        num_eval_examples: most dialogues for evaluation. No dialogue to train on begins as one of them.
        seed: seed of the dialogues.
    """
    if not 1 <= min_turns <= max_turns:
        raise ValueError(f"min_turns={min_turns} and max_turns={max_turns} must satisfy 1 <= min_turns <= max_turns")
    if not 2 <= min_words <= max_words:
        raise ValueError(f"min_words={min_words} and max_words={max_words} must satisfy 2 <= min_words <= max_words")
    if max_turns * max_words > (most := 26 if letters else len(NAMES)):
        raise ValueError(
            f"max_turns={max_turns} × max_words={max_words} words are needed, but there are only {most} {'letters' if letters else 'names'}"
        )
    if min_words == most:
        raise ValueError(f"min_words={min_words}: the first turn would always have all {most} words, so none could be held out; lower it")
    arguments = (letters, (min_turns, max_turns), (min_words, max_words))

    def right_turns(state: vf.State) -> float:
        """Share of the turns whose list is right; turns that were not reached are wrong."""
        return sum(env.right(state)) / len(state["info"]["turns"])

    def all_right(state: vf.State) -> float:
        """1.0 if every list is right. Not part of the reward."""
        return float(right_turns(state) == 1)

    def similarity(state: vf.State) -> float:
        """Longest-matching-blocks ratio of the last list and the right one, 0 to 1. Not part of the reward."""
        if not state["trajectory"]:
            return 0.0
        right = ordered(state["info"]["turns"][: len(state["trajectory"])])
        said = read_words(str(state["trajectory"][-1]["completion"][-1].content or ""))
        return difflib.SequenceMatcher(None, said[: 4 * len(right)], right).ratio()  # matching takes quadratic time

    env = AlphabetSort(
        letters,
        dataset=Dataset.from_list(build_rows(*arguments, num_examples, seed)),
        eval_dataset=lambda: Dataset.from_list(build_eval_rows(*arguments, num_eval_examples, seed + EVAL_SEED)),
        system_prompt=None if letters else SYSTEM_PROMPT,
        rubric=vf.Rubric(funcs=[right_turns, all_right, similarity], weights=[1.0, 0.0, 0.0]),
    )
    return env
