"""Hooks of `mkdocs build`: pages that lie outside of docs/ become part of the site, and links to files of the checkout become plain text.

In the repository the same links lead to the files, so the pages are written for both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/HISTORY.md": "history.md",
    "benchmarks/NEGATIVE_RESULTS.md": "negative_results.md",
}
LINK = re.compile(r"\[([^\]\n]*)\]\((?!https?:|#)([^)\s#]*)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of PAGES, under names inside docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at pages of the site; what is not on it is named without a link."""
    source = next((ROOT / path for path, name in PAGES.items() if name == page.file.src_uri), ROOT / "docs" / page.file.src_uri)

    def linked(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = (source.parent / target).resolve()
        if not path.is_relative_to(ROOT):
            return found[0]
        inside = path.relative_to(ROOT).as_posix()
        if inside in PAGES:
            return f"[{text}]({PAGES[inside]}{anchor})"
        return f"[{text}]({inside.removeprefix('docs/')}{anchor})" if inside.startswith("docs/") else text

    return LINK.sub(linked, markdown)
