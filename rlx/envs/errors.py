"""What an exception of an environment says to people: its chain of causes, and the line of the environment's own code that it comes from.

Imports the standard library alone, so that the process of an environment can use it too.

    in_one_line(error, sources_of("my-env"))
    "RewardError: scoring failed ← ValueError: bad digit 'x'; at /…/my_env/scores.py:41 in parse"
"""

from __future__ import annotations

import logging
import re
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MOST_CAUSES = 6  # of a chain that are shown
MAX_CHARS = 400  # characters of one error's message that are shown
_CLASSES = re.compile(r"(?:^| ← )(\w+)")  # in the text of a chain of causes
_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


def in_one_line(error: BaseException, sources: Path | None = None) -> str:
    """One line: the chain of causes with their messages, and the line of the environment's code that it comes from.

    `ModelError ← ServerDisconnectedError: Server disconnected; at /…/my_env.py:42 in ask`. A message that an inner error repeats is
    left out.
    """
    errors = list(chain(error))
    messages = [_message(each) for each in errors]
    parts = []
    for position, (each, message) in enumerate(zip(errors, messages, strict=True)):
        repeated = any(message in inner for inner in messages[position + 1 :])
        parts.append(type(each).__name__ + (f": {message}" if message and not repeated else ""))
    place = place_of(error, sources)
    return " ← ".join(parts[:MOST_CAUSES]) + (f"; at {place}" if place else "")


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, the outermost first. Of an exception group, its first member stands for all."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        if each.__cause__ is not None:
            each = each.__cause__
        elif each.__context__ is not None and not each.__suppress_context__:
            each = each.__context__
        else:
            each = each.exceptions[0] if isinstance(each, BaseExceptionGroup) else None


def place_of(error: BaseException, sources: Path | None = None) -> str:
    """The innermost line of the environment's own code that the innermost of the causes passed through; empty if there is none.

    Without `sources`, or if no line belongs to them: the innermost line outside of Python, installed packages and rlx.
    """
    for own in ([sources] if sources is not None else []) + [None]:
        for each in reversed(list(chain(error))):
            if isinstance(each, SyntaxError) and each.filename and each.lineno and _belongs(each.filename, own):
                return f"{each.filename}:{each.lineno} in <module>"
            for frame in reversed(traceback.extract_tb(each.__traceback__)):
                if frame.lineno is not None and _belongs(frame.filename, own):
                    return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def kind_of_text(text: str) -> str:
    """What stays equal of a failure's text when only numbers and quoted words of its messages differ."""
    message, mark, place = text.rpartition("; at ")
    return _VARIES.sub("…", message if mark else text)[:MAX_CHARS] + mark + (place if mark else "")


class FailureLog:
    """Writes each kind of failure with its traceback once, and counts its repetitions."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[tuple[str, str]] = Counter()  # by environment and kind

    def note(self, env: str, what: str, text: str, written: str = "") -> None:
        """Count a failure of environment `env`; write it if it is the first of its kind, or the 10th, 100th, 1000th, …

        `what`: what failed, for people ("example 12"). `written`: its traceback, if that is not written elsewhere.
        """
        message, mark, place = text.rpartition("; at ")
        # A message may have the model's own words. The classes and the line say enough where the traceback says the rest.
        kind = env, f"{_CLASSES.findall(message if mark else text)} {place if mark else ''}" if written else kind_of_text(text)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            self._log.warning("%s: %s failed: %s%s", env, what, text, written and f"\n{written}")
        elif count == 10 ** (len(str(count)) - 1):
            self._log.warning("%s: … %d more like it (%d in all): %s", env, count - count // 10, count, text)


def _message(error: BaseException) -> str:
    """The error's own message in one line, shortened."""
    is_key = isinstance(error, KeyError) and len(error.args) == 1  # whose text is the key alone
    text = f"no key {error.args[0]!r}" if is_key else " ".join(str(error).split())
    text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair could be neither sent nor recorded
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"


PYTHON = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
HERE = str(Path(__file__).resolve().parent.parent)


def _belongs(file: str, sources: Path | None) -> bool:
    """Whether a file belongs to `sources`; if that is None, whether it is neither Python's, nor an installed package's, nor rlx's."""
    if sources is None:
        return not file.startswith(("<", *PYTHON, sys.base_prefix + "/lib", HERE))
    return file == str(sources) or file.startswith(f"{sources}/")


def snake(name: str) -> str:
    """`ToolCallError` as `tool_call_error`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
