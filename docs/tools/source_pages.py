"""Adds pages to the site for files outside docs/ that its pages link to; README.md is the first.

This is an mkdocs hook. Markdown is unchanged, a notebook is rendered by its cells, and any other
file becomes a code block.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"  # else code ranks above the pages
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml", ".json": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every file that pages link to, directly or through other such files."""
    root = Path(config.config_file_path).parent
    listed = json.dumps(config.nav)
    pages = {file.src_uri: file.content_string for file in files if file.is_documentation_page()}
    listed_sources = [repository_path(uri) for uri in re.findall(r'"(source/[^"]+)"', listed)]
    waiting = ["README.md", *listed_sources, *(f"docs/{uri}" for uri in pages)]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        uri = site_path(path)
        if uri not in pages:
            level = InclusionLevel.INCLUDED if f'"{uri}"' in listed else InclusionLevel.NOT_IN_NAV
            pages[uri] = render(root / path)
            files.append(File.generated(config, uri, content=pages[uri], inclusion=level))
        linked = {resolve(path, link) for _, link, _ in LINK.findall(pages[uri])}
        found = {each for each in linked - seen if is_source(root, each)}
        waiting += found
        seen |= found
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links to files as links to their pages."""
    path = repository_path(page.file.src_uri)

    def moved(match: re.Match) -> str:
        target = site_path(resolve(path, match[2]))
        if files.get_file_from_path(target) is None:
            return match[0]  # reported by mkdocs
        here = posixpath.dirname(page.file.src_uri)
        return match[1] + posixpath.relpath(target, here) + match[3]

    return LINK.sub(moved, markdown)


def is_source(root: Path, path: str) -> bool:
    """Whether the path is a file of the repository outside docs/."""
    return not path.startswith(("docs/", "../")) and (root / path).is_file()


def resolve(path: str, link: str) -> str:
    """The repository path that a link in the file `path` points to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def site_path(path: str) -> str:
    """The path on the site for a path in the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path.removesuffix('.md')}.md"


def repository_path(uri: str) -> str:
    """The path in the repository for a path on the site."""
    if uri == "index.md":
        return "README.md"
    if not uri.startswith("source/"):
        return f"docs/{uri}"
    path = uri.removeprefix("source/").removesuffix(".md")
    return path if Path(path).suffix else f"{path}.md"


def render(path: Path) -> str:
    """A file as Markdown."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"])
        return "\n\n".join(
            source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells
        )
    return f"{UNSEARCHED}# {path.name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"
