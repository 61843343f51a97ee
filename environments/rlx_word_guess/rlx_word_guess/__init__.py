"""Guess a hidden word. After each guess, feedback says which letters are right: several turns, each depending on those before.

`+` is the right letter in its place, `?` a letter that stands elsewhere, `-` a letter that does not occur (again). The reward is 1.0 if the
word is guessed within `max_guesses`, else 0.0.

With an `alphabet`, words are random letters of it, and the dialogue is so short that a character model of under a million parameters plays:

    user ab 3 · assistant aab · user +?- · assistant aba · user +++       (with the words of an instruct model: `SYSTEM_PROMPT`)

A row is `question` and `answer` (the hidden word).
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import verifiers as vf
from datasets import Dataset

from rlx_word_guess.words import WORDS

SYSTEM_PROMPT = (
    "Guess a hidden English word of {length} letters in at most {max_guesses} guesses. After each guess you see one sign for each letter: "
    "+ the letter is right, ? the letter stands elsewhere in the word, - the letter is not in the word (or not once more). "
    "Think shortly, then write each guess between <guess> and </guess>."
)
MAX_CANDIDATES = 20_000  # words of an alphabet, because the teacher looks at them all
_TAG = re.compile(r"<(/?)guess>", re.IGNORECASE)


def feedback(guess: str, word: str) -> str:
    """One sign for each letter of the guess. A letter is marked `?` as often as it stands elsewhere and was not found."""
    left = Counter(letter for letter, tried in zip(word, guess, strict=True) if letter != tried)
    signs = []
    for letter, tried in zip(word, guess, strict=True):
        if letter == tried:
            signs.append("+")
        elif left[tried] > 0:
            left[tried] -= 1
            signs.append("?")
        else:
            signs.append("-")
    return "".join(signs)


def _tagged(text: str) -> str | None:
    """What the last pair of tags holds; None without one. Looks at each tag once: a model may write thousands that never end."""
    start, found = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            found, start = text[start : tag.start()], None
    return found


def read_guess(text: str) -> str:
    """The guess in a reply: what the last tags hold, or the whole reply, in lower case."""
    text = text.rpartition("</think>")[2]
    tagged = _tagged(text)
    return (text if tagged is None else tagged).strip().lower()


class WordGuess(vf.MultiTurnEnv):
    """The game. A guess that is no word of the right letters costs a turn and gets no signs."""

    def __init__(self, alphabet: str | None, length: int, words: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.alphabet, self.length, self.words = alphabet, length, words

    def is_word(self, guess: str) -> bool:
        """Whether a guess has the right length and only letters of the game."""
        letters = self.alphabet or "abcdefghijklmnopqrstuvwxyz"
        return len(guess) == self.length and all(letter in letters for letter in guess)

    def reply_to(self, guess: str, word: str) -> str:
        """What the environment says to a guess."""
        if not self.is_word(guess):
            return f"{self.length} of {self.alphabet}" if self.alphabet else f"Write a word of {self.length} letters in <guess></guess>."
        return feedback(guess, word)

    def guesses(self, state: vf.State) -> list[str]:
        """The guesses so far."""
        return [read_guess(str(step["completion"][-1].content or "")) for step in state["trajectory"]]

    @vf.stop
    async def guessed(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and self.guesses(state)[-1] == state["answer"]

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
        return [vf.UserMessage(role="user", content=self.reply_to(self.guesses(state)[-1], state["answer"]))]

    def demonstration(self, row: dict[str, Any], errs: bool, random: random.Random) -> list[dict[str, Any]]:
        """A teacher's game: each guess is the first word that agrees with all feedback. A teacher that errs guesses any word."""
        candidates, said = list(self.words), []
        for turn in range(self.max_turns):
            guess = random.choice(candidates) if errs else candidates[0]
            said.append({"role": "assistant", "content": guess if self.alphabet else f"<guess>{guess}</guess>"})
            if guess == row["answer"] or turn == self.max_turns - 1:
                break
            signs = feedback(guess, row["answer"])
            said.append({"role": "user", "content": signs})
            if not errs:
                candidates = [word for word in candidates if feedback(guess, word) == signs]
        return said


def build_rows(words: Sequence[str], question: str, num_examples: int, seed: int) -> list[dict[str, Any]]:
    """`num_examples` rows with words drawn from `words`. The same seed gives the same rows."""
    rng = random.Random(seed)
    return [{"question": question, "answer": rng.choice(words)} for _ in range(num_examples)]


def load_environment(
    alphabet: str | None = None,
    length: int = 5,
    max_guesses: int = 6,
    num_examples: int = 4096,
    num_eval_examples: int = 256,
    seed: int = 0,
) -> vf.MultiTurnEnv:
    """The environment.

    Args:
        alphabet: letters of random words, such as `abc`; None: English words of five letters.
        length: letters of a word.
        max_guesses: guesses in a game.
        num_examples: games to train on.
        num_eval_examples: games for evaluation, with a fifth of the words, the same for every seed, which no training game hides.
        seed: seed of the words.
    """
    if max_guesses < 1:
        raise ValueError(f"max_guesses={max_guesses} must be at least 1")
    if alphabet is None:
        if length != 5:
            raise ValueError(
                f"length={length}, but the English words have five letters; give an alphabet for other lengths, such as alphabet=abc"
            )
        words = list(WORDS)
        random.Random(0).shuffle(words)
        hidden, question = words, "Your first guess?"
    else:
        if len(set(alphabet)) != len(alphabet) or len(alphabet) < 2 or not re.fullmatch(r"[a-z]+", alphabet):
            raise ValueError(f"alphabet={alphabet} must be two or more different lower-case letters")
        if length < 1 or len(alphabet) ** length > MAX_CANDIDATES:
            raise ValueError(f"length={length} of alphabet={alphabet} gives {len(alphabet) ** length} words; the limit is {MAX_CANDIDATES}")
        words = ["".join(letters) for letters in itertools.product(alphabet, repeat=length)]
        hidden, question = random.Random(0).sample(words, len(words)), f"{length} of {alphabet}"
    kept = max(1, len(hidden) // 5)
    held_out, train = hidden[:kept], hidden[kept:]

    def solved(state: vf.State) -> float:
        """1.0 if the word was guessed."""
        return float(state["answer"] in env.guesses(state))

    def num_guesses(state: vf.State) -> float:
        """Guesses made. Not part of the reward."""
        return float(len(state["trajectory"]))

    def follows_feedback(state: vf.State) -> float:
        """Share of the guesses after the first that agree with all feedback before; 1.0 without any. Not part of the reward."""
        made = env.guesses(state)
        valid = [guess for guess in made if env.is_word(guess)]
        later = [
            env.is_word(guess) and all(feedback(old, guess) == feedback(old, state["answer"]) for old in made[:number] if env.is_word(old))
            for number, guess in enumerate(made)
            if number
        ]
        return sum(later) / len(later) if later and valid else float(not later)

    env = WordGuess(
        alphabet,
        length,
        words,
        dataset=Dataset.from_list(build_rows(train, question, num_examples, seed)),
        eval_dataset=lambda: Dataset.from_list(build_rows(held_out, question, num_eval_examples, seed + 1_000_003)),
        system_prompt=None if alphabet else SYSTEM_PROMPT.format(length=length, max_guesses=max_guesses),
        rubric=vf.Rubric(funcs=[solved, num_guesses, follows_feedback], weights=[1.0, 0.0, 0.0]),
        max_turns=max_guesses,
    )
    return env
