"""The HTML of a report: one file that needs no network. Everything that is shown is escaped here or in `chart.py`.

Prompts, completions and logs are untrusted. Besides escaping, the page's policy (CSP) allows exactly one script, by its hash (plotly with
`page.js`), and no request to anywhere. So text that became markup by mistake could still not run. Styles are free: plotly sets some.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

import rlx
from rlx.report.chart import number
from rlx.view.format_rollout import conversation, facts, more_facts

HERE = Path(__file__).parent
MAX_CHARS = 4000  # characters shown of one message
CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
# Characters that reorder or hide text around them: a completion must not disguise what it says.
HIDING = {code: f"⟨U+{code:04X}⟩" for code in (*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF)}


def page(title: str, subtitle: str, state: str, sections: Sequence[tuple[str, str]]) -> str:
    """The whole document. `sections`: (heading, HTML); empty ones are left out. `state` is a run's state or a count of states."""
    style, script = (HERE / "page.css").read_text(), f"{get_plotlyjs()}\n{(HERE / 'page.js').read_text()}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; {allowed}"
    shown = [(name, html) for name, html in sections if html]
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in shown)
    body = "".join(f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{html}</section>' for name, html in shown)
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{style}</style></head><body>"
        f'<header><div><h1>{text(title)}</h1><p class="sub">{text(subtitle)}</p></div>'
        f'<div class="right"><span class="state {_anchor(state.split(" ")[0])}">{text(state)}</span>'
        '<button id="theme" type="button" hidden>light / dark</button></div></header>'
        f"<nav>{links}</nav><main>{body}</main>"
        f"<footer>made by rlx {escape(rlx.__version__)} at {when}</footer><script>{script}</script></body></html>\n"
    )


def _anchor(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def text(value: Any) -> str:
    """Untrusted text as HTML that shows it as it is. Control, invisible and reordering characters become visible signs."""
    return escape(str(value).translate(CONTROL).translate(HIDING))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already. `kind`: a class."""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return ""
    top = f"<thead><tr>{''.join(f'<th>{text(name)}</th>' for name in head)}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def tiles(values: Mapping[str, str]) -> str:
    """Large numbers: label -> text."""
    return f'<dl class="tiles">{"".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in values.items())}</dl>'


def note(lines: Sequence[str], kind: str = "note") -> str:
    """A box of lines; empty text without any. `kind`: note or bad."""
    return f'<div class="{kind}">{"".join(f"<p>{text(line)}</p>" for line in lines)}</div>' if lines else ""


def grid(figures: Iterable[str]) -> str:
    """Charts beside each other."""
    inside = "".join(figures)
    return f'<div class="grid">{inside}</div>' if inside else ""


def folded(title: str, html: str, *, is_open: bool = False) -> str:
    """A part that a click opens; empty text without content."""
    return f"<details{' open' if is_open else ''}><summary>{text(title)}</summary>{html}</details>" if html else ""


def lines_of(content: str) -> str:
    """Preformatted untrusted text."""
    return f'<pre dir="auto">{text(content)}</pre>'


def shortened(content: str, longest: int = MAX_CHARS) -> str:
    """The beginning and the end of a long text, and how much is left out between."""
    if len(content) <= longest:
        return content
    half = longest // 2
    return f"{content[:half]}\n… {len(content) - 2 * half:,} characters left out …\n{content[-half:]}"


def bar(parts: Mapping[str, float], total: float) -> str:
    """Shares of a total as one line each: label, bar, percent. Parts may overlap, so they need not add up."""
    rows = []
    for name, value in parts.items():
        share = value / total if total else 0.0
        filled = f'<rect class="fill c0" width="{min(share, 1) * 100:.1f}" height="6"/>'
        drawn = f'<svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">{filled}</svg>'
        rows.append([text(name), drawn, f"{share:.0%}", f"{number(value)} s"])
    return table(["", "", "", ""], rows, "bars")


# rollouts


def rollout(record: Mapping[str, Any]) -> str:
    """One rollout: what it is, its messages, its rewards."""
    head = f'<p class="facts"><b class="reward">{text(facts(record))}</b></p>'
    more = [f"{name}: {shortened(value, 500)}" for name, value in more_facts(record)]
    said = "".join(
        f'<div class="message {"said" if message.sampled else "prompt"}"><span>{text(message.head or "text")}</span>'
        f"{lines_of(shortened(message.text))}</div>"
        for message in conversation(record)
    )
    return f'<article class="card">{head}{said}<p class="facts">{text(" · ".join(more))}</p></article>'
