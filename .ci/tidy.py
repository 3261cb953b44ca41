# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy on our C++ sources; what passed once is not looked at again.

A source passed if the same clang-tidy, with the same settings, compile command, torch
and text of the file and of every header of ours that it includes, found nothing. The
list of such passes is kept in ``BUILD/tidy.json``.
"""

import argparse
import hashlib
import json
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_OPENMP = "--extra-arg=-fno-openmp"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def include_dirs(command: list[str]) -> list[Path]:
    """Return the folders of a compile command that are ours, then torch's root."""
    found = []
    for i, word in enumerate(command):
        if word in ("-I", "-isystem"):
            found.append(Path(command[i + 1]))
        elif word.startswith("-I"):
            found.append(Path(word[2:]))
    return found


def our_headers(source: Path, dirs: list[Path]) -> list[Path]:
    """Return every file of this repository that ``source`` includes, itself first."""
    ours = [d for d in dirs if d.is_relative_to(ROOT) and ".venv" not in str(d)]
    seen: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen[file] = None
        for name in INCLUDE.findall(file.read_text()):
            for folder in [file.parent, *ours]:
                if (folder / name).is_file():
                    waiting.append((folder / name).resolve())
                    break
    return list(seen)


def key(tool: str, command: list[str], source: Path) -> str:
    """Return the hash of all that decides what clang-tidy finds in ``source``."""
    digest = hashlib.sha256(tool.encode())
    dirs = include_dirs(command)
    torch_versions = [d.parent / "version.py" for d in dirs]
    digest.update(shlex.join(command).encode())
    folders = [p for p in reversed(source.parents) if p.is_relative_to(ROOT)]
    settings = [folder / ".clang-tidy" for folder in folders]
    headers = sorted(our_headers(source, dirs))
    for file in [*settings, *headers, *torch_versions]:
        if file.is_file():
            digest.update(str(file).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def main() -> int:
    """Return 1 if clang-tidy found something, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="folder of compile_commands.json")
    parser.add_argument("-j", type=int, default=2, help="runs at the same time")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    tool = subprocess.check_output(["clang-tidy", "--version"], text=True)
    cache = build / "tidy.json"
    passed = set(json.loads(cache.read_text())) if cache.exists() else set()

    todo: dict[Path, str] = {}
    keys = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = (Path(entry["directory"]) / entry["file"]).resolve()
        if source.suffix != ".cpp" or not source.is_relative_to(ROOT):
            continue
        if source.is_relative_to(ROOT / "build"):
            continue
        keys.append(key(tool, shlex.split(entry["command"]), source))
        if keys[-1] not in passed:
            todo[source] = keys[-1]
    print(f"{len(keys)} sources, {len(keys) - len(todo)} known to be clean", flush=True)

    def check(source: Path) -> tuple[Path, float, int, str]:
        start = time.monotonic()
        run = subprocess.run(
            # Its omp.h is GCC's, which clang does not look for.
            ["clang-tidy", "-p", str(build), "--quiet", NO_OPENMP, str(source)],
            text=True,
            capture_output=True,
        )
        text = run.stdout
        if run.returncode and not text:
            text = run.stderr
        return source, time.monotonic() - start, run.returncode, text

    failures = 0
    # The largest first, so that none is left alone at the end.
    order = sorted(todo, key=lambda s: -s.stat().st_size)
    with ThreadPoolExecutor(max_workers=arguments.j) as pool:
        for done in as_completed([pool.submit(check, source) for source in order]):
            source, seconds, code, text = done.result()
            print(f"{seconds:6.1f} s  {source.relative_to(ROOT)}", flush=True)
            if code:
                failures += 1
                print(text, flush=True)
            else:
                passed.add(todo[source])
                cache.write_text(json.dumps(sorted(passed)))
    # Passes of older texts are forgotten.
    cache.write_text(json.dumps(sorted(passed & set(keys))))
    if failures:
        print(f"clang-tidy: {failures} sources with findings")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
