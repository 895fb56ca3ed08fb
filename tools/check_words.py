"""Check that the project is written in common words. `words.toml` lists uncommon words and what to use instead.

Names, comments, docstrings, messages and pages are all checked; a name is split at underscores and capitals. The budget
of a word is the number of times that it may occur, and must not grow: `python tools/check_words.py --lower` reduces
each budget to the present number.
"""

import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORDS = ROOT / "tools" / "words.toml"
PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def files(root: Path) -> Iterator[Path]:
    """Yield the files that are checked: source files, templates, documentation pages and the README."""
    yield root / "README.md"
    yield from sorted((root / "docs").glob("*.md"))
    for suffix in ("py", "html"):
        yield from sorted((root / "src").rglob(f"*.{suffix}"))


def count(text: str, words: set[str]) -> Counter[str]:
    """Count the given words in a text, including those with a hyphen or underscore, such as hand-out and keep_house."""
    lower = text.lower()
    found = Counter(part for part in map(str.lower, PARTS.findall(text)) if part in words)
    for word in words:
        if not word.isalpha():
            found[word] = len(re.findall(rf"(?<![a-z]){re.escape(word)}", lower))
    return +found


def check(root: Path, table: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    """Return the problems, and how often each word occurs outside of its exceptions."""
    words = table["words"]
    forms = {form: word for word, row in words.items() for form in (word, *row.get("forms", ()))}
    allowed: dict[str, set[str]] = defaultdict(set)
    for row in table.get("exceptions", ()):
        for path in row["files"]:
            allowed[path].update(row["words"])
    total: Counter[str] = Counter()
    where: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files(root):
        name = str(path.relative_to(root))
        for form, number in count(path.read_text(encoding="utf-8"), set(forms)).items():
            word = forms[form]
            if word not in allowed[name]:
                total[word] += number
                where[word][name] += number
    wrong = []
    for word, row in words.items():
        budget, number = row.get("budget", 0), total[word]
        if number > budget:
            places = ", ".join(f"{name} ({n})" for name, n in where[word].most_common(5))
            wrong.append(
                f"{word!r} occurs {number} times, {budget} are allowed; write {row['use']} instead: {places}"
            )
        elif number < budget:
            wrong.append(
                f"{word!r} occurs {number} times, less than its budget of {budget}: run with --lower"
            )
    return wrong, dict(total)


def lower(path: Path, total: dict[str, int]) -> None:
    """Reduce each budget in the file to the number of times that its word occurs."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := re.match(r'"?([a-z_-]+)"? = \{.*budget = (\d+)', line):
            word, budget = found[1], int(found[2])
            line = re.sub(r"budget = \d+", f"budget = {min(budget, total.get(word, 0))}", line)  # noqa: PLW2901 - still the same line
        lines.append(line)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Print all problems; return 1 if there are any."""
    wrong, total = check(ROOT, tomllib.loads(WORDS.read_text(encoding="utf-8")))
    if "--lower" in arguments:
        lower(WORDS, total)
        wrong, _ = check(ROOT, tomllib.loads(WORDS.read_text(encoding="utf-8")))
    print("\n".join(wrong) or "only common words")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
