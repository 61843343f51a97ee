"""Pages that are generated from the code say what the code says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import metrics_doc  # noqa: E402  (a script, not a module of the package)


def test_the_metrics_page_is_up_to_date():
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_doc.render(), "run `make docs`"


def test_links_between_the_pages_lead_somewhere():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    broken = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert not broken
