"""What mkdocs cannot do by itself: pages of source files, and a page of the commands.

Pages link to files of the repository (``../src/paceline/methods/bsp.py``). Each file, or folder,
that is linked to becomes a page ``source/...`` of the site, so that these links are checked and
work wherever the site is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.compile(r"\[([\w-]+\.md)\]\(((?:[\w.-]+/)*\1)([^)]*)\)")
LINK = re.compile(r"\]\(([^)#:\s]+)\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".diff": "diff", ".sh": "sh", ".c": "c"}
LANGUAGES |= {".yaml": "yaml", ".yml": "yaml", ".sbatch": "sh"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made: of what others link to, and of the commands."""
    docs = Path(config.docs_dir)
    pages = [Path(docs, file.src_uri) for file in files.documentation_pages()]
    made: set[Path] = set()
    while pages:
        page = pages.pop()
        for link in LINK.findall(page.read_text()):
            path = (page.parent / link).resolve()
            if not path.is_relative_to(docs) and path not in made:
                made.add(path)
                pages += [path] if path.suffix == ".md" else []
    for path in sorted(made):
        files.append(File.generated(config, _uri(path), content=_page(path)))
    css = (Path(__file__).parent / "site.css").read_text()
    files.append(File.generated(config, "site.css", content=css))
    commands = "reference/commands.md"
    files.append(File.generated(config, commands, content=commands_page()))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Links to files outside docs/ become links to their pages, and names of pages their titles."""
    docs, uri = Path(config.docs_dir), page.file.src_uri
    at = ROOT / uri.removeprefix("source/") if uri.startswith("source/") else docs / uri
    if not at.exists():
        return markdown  # a page that was made of something else

    def inside(match: re.Match[str]) -> str:
        path = (at.parent / match[1]).resolve()
        if path.is_relative_to(docs):
            return match[0]
        return f"]({os.path.relpath(_uri(path), os.path.dirname(uri) or '.')})"

    def titled(match: re.Match[str]) -> str:
        first = (at.parent / match[2]).read_text().partition("\n")[0]
        return f"[{first.removeprefix('# ')}]({match[2]}{match[3]})"

    return LINK.sub(inside, NAMED.sub(titled, markdown))


def _uri(path: Path) -> str:
    """Where a file's page is: beside those of its folder, never in the place of another's."""
    name = path.relative_to(ROOT)
    return f"source/{name}" if path.suffix == ".md" else f"source/{name}.md"


def _page(path: Path) -> str:
    """A file's text, or a folder's files one after the other."""
    name = path.relative_to(ROOT)
    if not path.exists():
        raise FileNotFoundError(f"a page links to {name}, which is not there")
    if path.suffix == ".md":
        return path.read_text()
    parts = [path] if path.is_file() else sorted(path.glob("*.py"))
    text = f"# `{name}`\n"
    for part in parts:
        if part != path:
            text += f"\n## `{part.name}`\n"
        fence = "````"
        language = LANGUAGES.get(part.suffix, "text")
        text += f"\n{fence}{language}\n{part.read_text()}{fence}\n"
    return text


def commands_page() -> str:
    """What each verb's --help says."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from paceline.cli import app

    text = "# Commands\n\nEach verb of `paceline`, as its `--help` tells it.\n"
    for verb in get_command(app).commands:  # type: ignore[attr-defined]
        columns = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
        said = CliRunner().invoke(app, [verb, "--help"], env=columns)
        if said.exit_code:
            raise RuntimeError(f"paceline {verb} --help failed:\n{said.output}")
        text += f"\n## paceline {verb}\n\n```text\n{said.output.strip()}\n```\n"
    return text
