"""Text for a terminal. What a model, an environment or another user's file wrote is shown there, and nothing of it is obeyed.

Also how times are written for people.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, cast

# An escape sequence could do anything; a carriage return or a mark for writing from right to left forges what stands beside it.
_CONTROL = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "␡"}
_UNSEEN = dict.fromkeys([*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)], "�")
_HALVES = dict.fromkeys(range(0xD800, 0xE000), "�")  # of a character: no encoding has them
_SHOWN = _CONTROL | _UNSEEN | _HALVES


def shown(text: str) -> str:
    """The text without characters that steer a terminal, or that cannot be written. Line breaks and tabs stay."""
    return text if text.isascii() and text.isprintable() else text.translate(_SHOWN)


class Shown:
    """A stream of text that writes what `shown` leaves. All else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return int(self.stream.write(shown(text)))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def raw(stream: Any) -> Any:
    """The stream below, for displays that steer the terminal themselves."""
    return stream.stream if isinstance(stream, Shown) else stream


@contextlib.contextmanager
def safe_output() -> Any:
    """Show all output of this process by `Shown`."""
    before = sys.stdout, sys.stderr
    for stream in map(raw, before):
        if hasattr(stream, "reconfigure"):  # PYTHONIOENCODING may name an encoding that lacks most characters
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = cast(Any, Shown(raw(before[0]))), cast(Any, Shown(raw(before[1])))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def clock(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`: of something that goes on."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def duration(seconds: float) -> str:
    """`40 ms`, `12.3 s`, `3.5 min`, `2.1 h` or `3 d`, in the unit that shows most of it."""
    for least, size, unit in ((172800, 86400, "d"), (7200, 3600, "h"), (120, 60, "min"), (0.9995, 1, "s")):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"
