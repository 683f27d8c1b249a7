"""Hooks of mkdocs: pages that are made from code, and files outside docs/ that pages link to.

README.md is the first page. Another file keeps its path: `../deploy/README.md` in docs/run.md leads
to the site's `deploy/README.md`. A folder becomes a list of its files, and a text file that is no
Markdown becomes a page that shows it.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))

import api  # noqa: E402
import options  # noqa: E402

NAMED = re.compile(r"\[([\w./-]+\.md)\]\(([^)#:\s]+\.md)(#[^)]*)?\)")
"""A link whose text is the name of a file, which a reader of the site never sees."""

LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")
SHOWN = {".yaml": "yaml", ".yml": "yaml", ".service": "ini", ".sysusers": "text", ".py": "python"}
"""Files that get a page which shows their text, with the language of the text."""

sources: dict[str, str] = {}
"""The path in the repository of each page, by its path in the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the API into the navigation."""
    assert config.nav is not None
    config.nav[-1]["Reference"].insert(1, {"API": [path for path, _ in api.pages()]})
    return config


def place(path: str) -> str:
    """Return the path in the site of a file or folder of the repository."""
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        path = f"{path}/README.md" if (ROOT / path / "README.md").exists() else f"{path}/index.md"
    elif Path(path).suffix in SHOWN or Path(path).name == "Containerfile":
        path = f"{path}.md"
    return path.removeprefix("docs/")


def targets(path: str, text: str) -> list[str]:
    """Return the files and folders of the repository that a page links to."""
    folder = posixpath.dirname(path)
    found = [posixpath.normpath(posixpath.join(folder, link)) for _, link, _ in LINK.findall(text)]
    return [one for one in found if (ROOT / one).exists()]


def text_of(path: str) -> str:
    """Return the Markdown of the page of a file or folder."""
    file = ROOT / path
    if file.is_dir():
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", path],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        lines = [
            f"- [{posixpath.relpath(one, path)}]({posixpath.relpath(one, path)})" for one in listed
        ]
        return "\n".join([f"# {path}", "", *lines])
    text = file.read_text()
    if file.suffix == ".md":
        return text
    return f"# {path}\n\n````{SHOWN.get(file.suffix, 'text')}\n{text}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from code, and all that is linked to outside docs/."""
    sources.clear()
    for file in files.documentation_pages():
        sources[file.src_uri] = f"docs/{file.src_uri}"
    waiting = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    for path in sources.values():
        waiting += targets(path, (ROOT / path).read_text())
    while waiting:
        path = waiting.pop()
        uri = place(path)
        if files.get_file_from_path(uri) is not None:
            continue
        if not uri.endswith(".md"):
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
            continue
        text = text_of(path)
        if (ROOT / path).is_dir() and uri.endswith("README.md"):
            path = f"{path}/README.md"
            text = text_of(path)
        sources[uri] = f"{path}/index.md" if (ROOT / path).is_dir() else path
        files.append(File.generated(config, uri, content=text))
        waiting += targets(sources[uri], text)
    for uri, text in [("options.md", options.page(ROOT)), *api.pages()]:
        files.append(File.generated(config, uri, content=text))
    for file in files.documentation_pages():
        if file.src_uri.startswith(("runbooks/", "deploy/", "benchmarks/")):
            file.inclusion = file.inclusion.__class__.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to the place of their target in the site, and indent lists as Markdown asks."""
    path = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))
        if not (ROOT / target).exists():
            return link[0]
        return f"{link[1]}{posixpath.relpath(place(target), here or '.')}{link[3]}"

    def titled(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))
        title = (ROOT / target).read_text().partition("\n")[0].lstrip("# ")
        return f"[{title}]({link[2]}{link[3] or ''})"

    markdown = LINK.sub(led, NAMED.sub(titled, markdown))
    return re.sub(r"(?m)^   (?=(?:- |  )\S)", "    ", markdown)


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Make links of the pages that docstrings name, such as `(docs/duplicates.md)`.

    Raises:
        PluginError: a docstring names a page that does not exist.
    """
    if page.file.src_uri in sources:
        return html

    def linked(found: re.Match[str]) -> str:
        file = files.get_file_from_path(found[1].removeprefix("docs/"))
        if file is None:
            raise PluginError(
                f"{page.file.src_uri}: a docstring names {found[1]}, which is no page"
            )
        return f'<a href="{file.url_relative_to(page.file)}">{found[1]}</a>'

    return re.sub(r"(?<![/\w])(docs/[\w/-]+\.md)", linked, html)
