"""Breaks styled text into lines of a width, for long texts: a conversation, or 100,000 tokens. Knows nothing of a screen."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from rich.style import Style

Piece = tuple[str, Style]
_WORDS = re.compile(r"\n|[^\S\n]+|[^\s]+")
# Control characters of a policy's text must not reach the terminal: an escape sequence could do anything.
_CONTROL = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "␡"} | dict.fromkeys(range(128, 160), "�")
_BIDI = {ord(char): "�" for char in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"}
_PRINTABLE = {**_CONTROL, **_BIDI, ord("\t"): "    "}


def printable(text: str) -> str:
    """The text without characters that steer a terminal; line breaks stay."""
    return text.translate(_PRINTABLE)


def words(text: str, style: Style) -> list[Piece]:
    """A text as pieces between which a line may break."""
    return [(word, style) for word in _WORDS.findall(printable(text))]


def flow(pieces: Iterable[Piece], width: int, indent: int = 0) -> list[list[Segment]]:
    """Lines of at most `width` cells. A piece that does not fit begins the next line; one that is longer than a line is cut."""
    width = max(width - indent, 8)
    margin = [Segment(" " * indent)] if indent else []
    lines, line, used = [], list(margin), 0
    for text, style in pieces:
        parts = text.split("\n")
        for number, part in enumerate(parts):
            if number:
                lines.append(line)
                line, used = list(margin), 0
            if not part:
                continue
            size = cell_len(part)
            if used and used + size > width:
                lines.append(line)
                line, used = list(margin), 0
                if part.isspace() and len(text) == len(part) and not style.bgcolor:  # a space at a break
                    continue
            chunks = chop_cells(part, width) if size > width else [part]
            for chunk in chunks[:-1]:
                lines.append([*line, Segment(chunk, style)])
                line = list(margin)
            line.append(Segment(chunks[-1], style))
            used += cell_len(chunks[-1])
    lines.append(line)
    return lines
