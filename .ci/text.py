# SPDX-License-Identifier: Apache-2.0
"""Trims trailing whitespace, ends files by one newline, refuses files over 500 kB.

``text.py FILES`` repairs what it can and returns 1 if anything was wrong; ``--check``
only reports. Without files it takes all that git knows.
"""

import argparse
import subprocess
import sys
from pathlib import Path

LIMIT = 500_000


def repaired(text: bytes) -> bytes:
    """Return the text without trailing whitespace and with one newline at its end."""
    lines = [line.rstrip() for line in text.split(b"\n")]
    body = b"\n".join(lines).rstrip(b"\n")
    return body + b"\n" if body else b""


def main() -> int:
    """Return 1 if a file was wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="repair nothing")
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    files = arguments.files
    if not files:
        command = ["git", "ls-files", "-z", "--cached", "--others"]
        listed = subprocess.check_output([*command, "--exclude-standard"], text=True)
        files = [Path(name) for name in listed.split("\0") if name]
    wrong = 0
    for file in files:
        if not file.is_file() or file.is_symlink():
            continue
        content = file.read_bytes()
        if len(content) > LIMIT:
            print(f"{file}: {len(content)} bytes, at most {LIMIT} are allowed")
            wrong = 1
        if b"\0" in content or repaired(content) == content:
            continue
        print(f"{file}: whitespace at the end of a line or of the file")
        wrong = 1
        if not arguments.check:
            file.write_bytes(repaired(content))
    return wrong


if __name__ == "__main__":
    sys.exit(main())
