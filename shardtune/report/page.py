"""How does a view become a page? One HTML file with its style, scripts and numbers inside; nothing is ever fetched."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardtune.durable import write_output
from shardtune.errors import ShardtuneError, UserInputError

SCRIPTS = ("elements.js", "charts.js", "page.js")
# Data blocks are not scripts to a browser; of the scripts only ours and the chart library's, by their checksums, run.
_POLICY = (
    "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def asset(name: str) -> str:
    """A file of our own that belongs to the pages."""
    return (files("shardtune.report") / "assets" / name).read_text(encoding="utf-8")


def chart_library() -> str:
    """The script of plotly.js as its Python package ships it.

    Plotly rather than Bokeh: its script is larger (4.8 MB against 1.4), but one call redraws a chart from plain data,
    so that report and dashboard share their code, and it needs two small packages where Bokeh needs nine, a web
    server among them.
    """
    try:
        return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ShardtuneError(
            "The charts need the package plotly, which is not installed.", fix="Run: pip install 'plotly>=7.1'"
        ) from error


def page(view: dict[str, Any]) -> str:
    """The whole report as text."""
    scripts = [*(asset(name) for name in SCRIPTS)]
    library = _closed(chart_library())
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in (*scripts, library))
    title = escape(view["title"], quote=True)
    return (
        '<!doctype html>\n<html lang="en" data-mode="report">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(hashes=hashes)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f'<title>{title}</title>\n<link rel="icon" href="data:,">\n<style>{asset("style.css")}</style>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts)
        + "\n</head>\n<body>\n<noscript>This report needs JavaScript, which is disabled.</noscript>\n"
        f'<script type="application/json" id="view">{embedded(view)}</script>\n'
        f"<script>{library}</script>\n</body>\n</html>\n"
    )


def embedded(view: dict[str, Any]) -> str:
    """JSON that cannot close its HTML element: `<`, `>` and `&` are escaped."""
    text = json.dumps(view, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_page(view: dict[str, Any], path: Path) -> int:
    """Write the report; returns its size in bytes."""
    text = page(view)
    try:
        write_output(path, text)
        if path.is_file():
            path.chmod(0o644)  # whatever the umask
    except OSError as error:
        raise UserInputError(
            f"Could not write the report '{path}'.",
            why=error.strerror or str(error),
            fix="Pass -o FILE in an existing, writable folder.",
        ) from error
    return len(text.encode("utf-8"))


def shell(
    scripts: Sequence[str],
    version: str,
    *,
    mode: str = "dashboard",
    title: str = "shardtune",
    styles: Sequence[str] = ("style.css",),
) -> str:
    """The empty page of a served site; its scripts fetch what it shows."""
    links = "\n".join(f'<link rel="stylesheet" href="/static/{name}?v={version}">' for name in styles)
    tags = "\n".join(f'<script src="/static/{name}?v={version}" defer></script>' for name in scripts)
    return (
        f'<!doctype html>\n<html lang="en" data-mode="{mode}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n{links}\n{tags}\n'
        f"</head>\n<body>\n<noscript>The {mode} needs JavaScript, which is disabled.</noscript>\n"
        "</body>\n</html>\n"
    )


def _closed(script: str) -> str:
    """A script must not contain its closing tag; in a string or a regex `<\\/` means the same."""
    return script.replace("</script", "<\\/script")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
