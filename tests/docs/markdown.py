"""What the tests of the documents read: every Markdown file, its code blocks, its inline code, its links and headings."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")])
_SHELL_LANGUAGES = ("", "bash", "sh")


@dataclass(frozen=True)
class Block:
    file: Path
    line: int
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, continued lines joined; comments and blank lines are none. A drawing has none."""
        if self.language not in _SHELL_LANGUAGES or "►" in self.text:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks(file: Path) -> list[Block]:
    found, opened, start = [], None, 0
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened, start = line[3:].strip(), number
        else:
            found.append(Block(file, start, opened, "\n".join(lines[start : number - 1])))
            opened = None
    assert opened is None, f"{file}:{start}: a code block that does not end"
    return found


def prose(file: Path) -> str:
    """Without the code blocks."""
    return re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def inline_code(file: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(file))]


def links(file: Path) -> list[str]:
    """Pictures too, also those written as HTML."""
    return links_of(re.sub(r"`[^`]*`", "", prose(file)))


def links_of(text: str) -> list[str]:
    in_tags = [value for tag in re.findall(r"<(?:img|source|a)\b[^>]*>", text) for value in _tag_links(tag)]
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text) + in_tags


def _tag_links(tag: str) -> list[str]:
    """A srcset lists several, each with its width or density."""
    found = re.findall(r"""\b(src|href|srcset)=["']([^"']+)["']""", tag)
    return [part.split()[0] for name, value in found for part in (value.split(",") if name == "srcset" else [value])]


def anchors(file: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(file), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def words(command: str) -> list[str]:
    """A command's words without comment, redirection and what follows a pipe."""
    command = re.split(r"\s+[|>]\s*", command)[0]
    return shlex.split(command, comments=True)
