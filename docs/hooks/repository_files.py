"""How do links work on the site as they do on a git forge? MkDocs calls these functions (mkdocs.yml, `hooks`).

Pages link to `../configs/x.yaml` or `../CONTRIBUTING.md`. No address of a repository is known, so each such file
becomes a page of the site (`repository/…`), and links to it lead there. A link that is called by its file
(`[data.md](data.md)`) is called by the page's name in the menu.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[2]
FOLDER = "repository"
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(?=[)#])")
_NAMED = re.compile(r"\[(?P<text>[\w/.-]+\.md)\]\((?P<target>[^)\s:]+)\)")
_LANGUAGES = {".yaml": "yaml", ".py": "python", ".txt": "text", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside docs/ that a page links to, and for those that such pages link to."""
    waiting = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while waiting:
        uri, text = waiting.pop()
        for outside in sorted(_outside(uri, text)):
            page = _page_uri(outside)
            if files.get_file_from_path(page) is None:
                content = _content(uri, outside)
                files.append(File.generated(config, page, content=content))
                waiting.append((page, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside docs/ lead to their pages."""

    names = {file.src_uri: file.page.title for file in files.documentation_pages() if file.page and file.page.title}

    def named(link: re.Match[str]) -> str:
        target = _target(page.file.src_uri, link["target"].partition("#")[0])
        return f"[{names.get(target.removeprefix('docs/'), link['text'])}]({link['target']})"

    def moved(link: re.Match[str]) -> str:
        target = _target(page.file.src_uri, link[1])
        inside = target.removeprefix("docs/") if target.startswith("docs/") else _page_uri(target)
        return posixpath.relpath(inside, posixpath.dirname(page.file.src_uri) or ".")

    return _in_prose(markdown, lambda prose: _LINK.sub(moved, _NAMED.sub(named, prose)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A bar in the code of a table is written with a backslash, which a forge takes away and Python-Markdown leaves."""
    return re.sub(r"<td[^>]*>.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


def _outside(uri: str, text: str) -> set[str]:
    """The files of the repository outside docs/ that a page links to."""
    targets: set[str] = set()
    _in_prose(text, lambda prose: targets.update(_target(uri, link) for link in _LINK.findall(prose)) or prose)
    return {target for target in targets if not target.startswith("docs/") and target != "README.md"}


def _target(uri: str, link: str) -> str:
    """A link of a page, from the root of the repository. A page of `repository/` links from where its file lies."""
    place = uri.removeprefix(f"{FOLDER}/") if uri.startswith(f"{FOLDER}/") else f"docs/{uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))


def _page_uri(target: str) -> str:
    if target == "README.md":
        return "index.md"  # says the same, for readers of the site
    return f"{FOLDER}/{target}" if target.endswith(".md") else f"{FOLDER}/{target}.md"


def _content(uri: str, target: str) -> str:
    path = REPOSITORY / target
    if path.is_dir():
        entries = sorted(entry.name for entry in path.iterdir() if entry.is_file())
        return "\n".join(
            [f"# {target}/", "", *(f"- [{name}]({posixpath.basename(target)}/{name})" for name in entries)]
        )
    if not path.is_file():
        raise PluginError(f"{uri} links to {target}, which is not in the repository")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    language = _LANGUAGES.get(path.suffix, "text")
    return f"# {target}\n\n````{language}\n{text.rstrip()}\n````\n"


def _in_prose(markdown: str, change: Any) -> str:
    """Change what is outside of code, fenced and inline."""
    parts = re.split(r"(^(?P<fence>`{3,}).*?^(?P=fence)`*$|`[^`\n]*`)", markdown, flags=re.DOTALL | re.MULTILINE)
    # Three parts for each: what stands before, the code, and its fence (None for inline code).
    return "".join(part if i % 3 else change(part) for i, part in enumerate(parts) if i % 3 != 2)
