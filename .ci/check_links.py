"""Checks that every relative link of the Markdown files leads to a file, and every anchor to a heading."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.+?)\s*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def markdown_files() -> list[Path]:
    """Returns the Markdown files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names]


def anchors(text: str) -> set[str]:
    """Returns the anchors of a file's headings."""
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in HEADING.findall(text)}


def broken(file: Path) -> list[str]:
    """Returns what is wrong with a file's links."""
    text = FENCE.sub("", file.read_text())
    problems = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        if not target.exists():
            problems.append(f"{file.relative_to(ROOT)}: {link}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(FENCE.sub("", target.read_text())):
            problems.append(f"{file.relative_to(ROOT)}: {link}: there is no such heading")
    return problems


def main() -> int:
    """Prints the broken links; returns 1 if there are any."""
    files = markdown_files()
    problems = [problem for file in files for problem in broken(file)]
    print(*problems, f"{len(files)} Markdown files, {len(problems)} broken links", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
