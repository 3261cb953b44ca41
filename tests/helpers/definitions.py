# SPDX-License-Identifier: Apache-2.0
"""The one-definition rule, checked on the sources of the library.

Two classes of one name in one namespace, defined in different files, are one class to
the linker: it keeps the functions of either for both, and a program that mixes them
crashes without a word from any tool. So each name is defined in one file only; what
belongs to one file alone stands in an unnamed namespace.

``python tests/helpers/definitions.py`` checks this repository and prints each clash.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("torch_sm3/csrc", "reversible", "pipeline")
CXX = {".h", ".cuh", ".cpp", ".cu"}

# What must not be read as code keeps its line breaks, so that lines can be counted.
SILENT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<mark>[^()\s\\]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|"""
    r"""(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE,
)
TOKEN = re.compile(r"[A-Za-z_]\w*|::|\[\[|\]\]|[^\s\w]|\d\w*")
KINDS = ("class", "struct", "union", "enum")
ACCESS = (["public"], ["private"], ["protected"])


@dataclass(frozen=True)
class Definition:
    """A class, struct, union or enumeration that is seen outside its file."""

    name: str
    file: str
    line: int


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield each token of a source with the number of its line."""
    code = SILENT.sub(lambda hit: re.sub(r"[^\n]", " ", hit.group()), text)
    line, at = 1, 0
    for hit in TOKEN.finditer(code):
        line += code.count("\n", at, hit.start())
        at = hit.start()
        yield hit.group(), line


def _without_templates(head: list[str]) -> list[str]:
    """Drop ``template <…>`` and attributes from what stands before a brace."""
    out: list[str] = []
    i = 0
    while i < len(head):
        if head[i] == "template" and head[i + 1 : i + 2] == ["<"]:
            i += _closed(head, i + 1, "<", ">")
        elif head[i] == "[[":
            i += head[i:].index("]]")
        elif head[i] in ("alignas", "__attribute__") and head[i + 1 : i + 2] == ["("]:
            i += _closed(head, i + 1, "(", ")")
        else:
            out.append(head[i])
        i += 1
    return out


def _closed(words: list[str], start: int, opening: str, closing: str) -> int:
    """Return how far behind ``start - 1`` the bracket opened there is closed."""
    depth = 0
    for i in range(start, len(words)):
        depth += (words[i] == opening) - (words[i] == closing)
        if depth == 0:
            return i - start + 1
    return len(words) - start


def _named(head: list[str]) -> str | None:
    """Return the name that a brace after ``head`` defines, "" if it has none.

    None if it opens anything but a class: a function, an initializer, a linkage.
    """
    head = _without_templates(head)
    first = next((i for i, word in enumerate(head) if word in KINDS), None)
    if first is None or any(word in ("(", "=", "return") for word in head[:first]):
        return None
    words = head[first + 1 :]
    if words[:1] and words[0] in ("class", "struct"):  # enum class
        words = words[1:]
    name: list[str] = []
    for i, word in enumerate(words):
        if word == ":" or word == "final":
            break
        if word == "<":  # a specialisation is a class of its own
            name += words[i : i + 1 + _closed(words, i, "<", ">")]
            break
        if word in ("(", "=", "*", "&"):
            return None  # a function that returns one
        # What stands before the last word is a macro, as TORCH_SM3_API.
        name = [*name, word] if name[-1:] == ["::"] or word == "::" else [word]
    return "".join(name)


def _namespace(head: list[str]) -> str | None:
    """Return the namespace that a brace after ``head`` opens, "" for an unnamed one."""
    head = [word for word in _without_templates(head) if word != "inline"]
    if head[:1] != ["namespace"]:
        return None
    return "".join(head[1:])


def definitions(text: str, file: str) -> Iterator[Definition]:
    """Yield what a source defines for others to see."""
    # Of each open brace: the name it adds, or None where nothing inside is seen.
    scopes: list[str | None] = []
    head: list[str] = []
    for token, line in _tokens(text):
        if token == "{":
            space = _namespace(head)
            name = space if space is not None else _named(head)
            seen = name != "" and name is not None and None not in scopes
            if seen and space is None:
                yield Definition(
                    "::".join([*filter(None, scopes), name or ""]), file, line
                )
            linkage = head == ["extern"]
            scopes.append(name if seen else ("" if linkage else None))
            head = []
        elif token == "}":
            if scopes:
                scopes.pop()
            head = []
        elif token == ";" or (token == ":" and head[-1:] in ACCESS):
            head = []
        else:
            head.append(token)


def check(root: Path = ROOT) -> list[str]:
    """Return one sentence for each name that two files below ``root`` define."""
    found: dict[str, list[Definition]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in CXX and path.is_file():
                shown = path.relative_to(root).as_posix()
                for one in definitions(path.read_text(encoding="utf-8"), shown):
                    found.setdefault(one.name, []).append(one)
    return [
        f"{name} is defined in "
        + " and ".join(f"{one.file}:{one.line}" for one in all_of_it)
        for name, all_of_it in sorted(found.items())
        if len({one.file for one in all_of_it}) > 1
    ]


def main() -> int:
    """Check this repository."""
    problems = check()
    print("\n".join(problems) or "every class is defined in one file")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
