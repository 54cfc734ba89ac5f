"""Checks prose: no sentence above 40 words, and no home-made term.

python website/prose.py [FILE...]           # without files: README, docs, error messages, docstrings
python website/prose.py --count [FILE...]   # words, median and 95th percentile of sentences

Code blocks, tables, commands and figures of a page are no prose. A sentence ends at a full stop, at a
colon or semicolon that ends a line, and at the end of a paragraph or of a list's item.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 40
HOME_MADE = {
    r"roll calls?": "active workers",
    r"keeps? (?:\w+ )?company": "takes part in shadow collectives",
    r"guests?": "late joiner",
    r"parcels?": "update batch",
    r"opinions?": "model of a worker",
    r"virtual world|emulated world|real world": "simulated, emulated or real runtime",
    r"fusion": "buckets, bucketing",
    r"lateness": "delay",
    r"codes that|of codes|with codes": "compressor, compression",
    r"in the long run": "in steady state",
}
"""What the glossary has another word for."""
HIDDEN = (
    re.compile(r"^(`{3,}|~{3,}).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^\s*\|.*$", re.MULTILINE),
    re.compile(r"^(?: {4,}|\t)(?![-*0-9]).*$", re.MULTILINE),
    re.compile(r"!\[[^\]]*\]\([^)]*\)"),
)
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|al|Fig|Eq|Sec|Theorem \d)\.")
ITEM = re.compile(r"\n\s*(?:[-*>]|\d+\.)\s|\n\s*\n|\n#+ |:\n")
END = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[(\"*_`\[]*[A-Z0-9`])")


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page in Markdown."""
    for hidden in HIDDEN:
        text = hidden.sub("\n\n", text)
    text = re.sub(r"`[^`\n]+`", "`code`", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = ABBREVIATIONS.sub(r"\1", text)
    for part in ITEM.split("\n\n" + text):
        for sentence in END.split(part):
            if words := " ".join(sentence.split()):
                yield words


def length(sentence: str) -> int:
    """Words of a sentence."""
    return len(re.findall(r"[\w`][\w`'.%/-]*", sentence))


def docstrings(source: str) -> str:
    """All docstrings of a module, as paragraphs; sections of arguments are lists."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            text = ast.get_docstring(node) or ""
            # An argument is an item; a table, an example or a diagram is no prose.
            text = re.sub(r"\n\n(?: {4}[^\n]*(?:\n|$))+", "\n\n", text)
            text = re.sub(r"^-{3,}$", "\n", text, flags=re.M)
            text = re.sub(r"^=+ +=.*^=+ +=[= ]*$", "", text, flags=re.M | re.S)
            text = re.sub(r"::\n\n(?: +[^\n]*\n?|\n)+", ".\n\n", text)
            text = re.sub(r"^ {4}(?=\*?\w+(?: \([^)]*\))?: )", "\n- ", text, flags=re.M)
            found.append(re.sub(r"^ +", "", text, flags=re.MULTILINE))
    return "\n\n".join(found)


def prose_of(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".txt":  # messages: places for values are one word each
        return "\n\n".join(re.sub(r"\{[^}]*\}", "it", text).splitlines())
    return docstrings(text) if path.suffix == ".py" else text


def faults(path: Path) -> Iterator[str]:
    """What is wrong with a file's prose."""
    text = prose_of(path)
    for sentence in sentences(text):
        if (count := length(sentence)) > MOST_WORDS:
            yield f"{count} words, at most {MOST_WORDS}: {sentence}"
        for term, better in HOME_MADE.items():
            if found := re.search(rf"\b(?:{term})\b", sentence, re.IGNORECASE):
                yield f'"{found[0]}": say {better}: {sentence}'


def all_files() -> list[Path]:
    """All that is checked."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    messages = ROOT / "tests" / "golden" / "messages.txt"
    return sorted([*pages, messages, *(ROOT / "src").rglob("*.py")])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--count", action="store_true")
    arguments = parser.parse_args()
    files = arguments.files or all_files()
    if arguments.count:
        for path in files:
            lengths = [length(one) for one in sentences(prose_of(path))]
            if len(lengths) > 1:
                late = quantiles(lengths, n=20, method="inclusive")[-1]
                print(
                    f"{path}: {sum(lengths)} words, median {median(lengths):g}, 95 % within {late:g}"
                )
        return 0
    found = [
        f"{path.resolve().relative_to(ROOT)}: {fault}"
        for path in files
        for fault in faults(path)
    ]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
