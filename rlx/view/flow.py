"""Breaks styled text into lines of a width, for long texts: a conversation, or 100,000 tokens. Knows nothing of a screen."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from rich.style import Style

from rlx.view.lines import printable

Piece = tuple[str, Style]
_WORDS = re.compile(r"\n|[^\S\n]+|[^\s]+")


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
