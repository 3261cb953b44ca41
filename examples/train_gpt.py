# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on real text with all four parts of torch_sm3.

``python examples/train_gpt.py`` starts two processes under torchrun and trains with
SM3, reversible blocks and Adasum; then the same cut into two pipeline stages; then
AdamW with plain blocks and the mean, on the same data; and compares the three.
``torchrun --standalone --nproc-per-node=2 examples/train_gpt.py`` runs one
configuration. See docs/train_gpt.md.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import finished, write_atomically, write_json
from console import Console
from data import Corpus, load_corpus
from gpt import BLOCKS
from report import draw, name_of, table
from training import settings_of, train

from torch_sm3.pipeline import plan

#: Best of a grid for 2 processes and the other defaults; see docs/train_gpt.md.
DEFAULT_LR = {"sm3": 0.05, "adamw": 0.006}
RANKS = 2
#: Schedules of a pipeline.
KINDS = (
    *("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zbv"),
    *("v_half", "v_min", "dualpipe_v"),
)
#: Flags of a pipeline, and what they are for DDP.
PIPELINE: dict[str, Any] = {
    **{"pipeline": None, "chunks": None, "microbatches": None},
    **{"clip": None, "post_validate": False, "trace": False},
}
#: Equal for all configurations. One thread a rank, as two ranks share two cores. One
#: arena, so that resident memory does not depend on which thread freed what; and freed
#: blocks up to 32 MiB are used again: returned to the kernel and faulted in anew for
#: each tensor, they would cost a third of the time.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**20),
}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        description="Train a small GPT on real text and compare it with AdamW.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--optimizer", choices=("sm3", "adamw"), default="sm3")
    p.add_argument("--blocks", choices=BLOCKS, default="reversible")
    p.add_argument(
        "--combine",
        choices=("adasum", "delta", "mean"),
        help="gradients of ddp, or for delta the updates by adasum (adasum)",
    )
    p.add_argument("--parallel", choices=("ddp", "pipeline"), default="ddp")
    p.add_argument("--pipeline", choices=KINDS, help="kind of schedule (1f1b)")
    p.add_argument("--chunks", type=int, help="stages of a rank (as the kind says)")
    p.add_argument("--microbatches", type=int, help="of a pipeline step (4)")
    p.add_argument("--clip", type=float, help="norm of a pipeline's gradients")
    p.add_argument(
        "--post-validate", action="store_true", help="step first, look at norms later"
    )
    p.add_argument("--trace", action="store_true", help="write a pipeline's trace.json")
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--depth", type=int, default=12)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--context", type=int, default=64, help="characters of a window")
    p.add_argument("--batch", type=int, default=32, help="windows of a step and rank")
    p.add_argument("--lr", type=float, help=f"learning rate {DEFAULT_LR}")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--corpus", type=Path, help="a UTF-8 text (Jane Austen's novels)")
    p.add_argument("--out", type=Path, default=Path("runs/train_gpt"))
    p.add_argument("--resume", action="store_true", help="continue the run in --out")
    p.add_argument("--save-every", type=int, default=25, help="steps")
    p.add_argument("--alone", action="store_true", help="train this configuration only")
    p.add_argument("--one-of-two", action="store_true", help=argparse.SUPPRESS)
    return p


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line and fill in what depends on other flags."""
    p = parser()
    args = p.parse_args(arguments)
    pipeline = args.parallel == "pipeline"
    if pipeline and args.combine:
        p.error("--combine is for --parallel ddp: a pipeline has no replicas")
    for name, default in PIPELINE.items():
        if not pipeline and getattr(args, name) != default:
            p.error(f"--{name.replace('_', '-')} is for --parallel pipeline")
    for name in ("steps", "width", "depth", "heads", "context", "batch", "save_every"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')}: expected at least 1")
    if pipeline:
        args.pipeline = args.pipeline or "1f1b"
        args.microbatches = 4 if args.microbatches is None else args.microbatches
        ranks = int(os.environ.get("WORLD_SIZE", RANKS))
        try:
            plan(args.pipeline, ranks, args.microbatches, chunks=args.chunks)
        except ValueError as error:
            p.error(str(error))
    else:
        args.combine = args.combine or "adasum"
    if args.lr is None:
        args.lr = DEFAULT_LR[args.optimizer]
    return args


def baseline_of(args: argparse.Namespace) -> argparse.Namespace:
    """Return the same run with AdamW, plain blocks and DDP's mean."""
    changed: dict[str, Any] = {
        "optimizer": "adamw",
        "blocks": "plain",
        "combine": "mean",
        "parallel": "ddp",
        "lr": DEFAULT_LR["adamw"],
        **PIPELINE,
    }
    return argparse.Namespace(**{**vars(args), **changed})


def pipeline_of(args: argparse.Namespace) -> argparse.Namespace:
    """Return the same run as two stages of one model instead of two replicas."""
    changed: dict[str, Any] = {"parallel": "pipeline", "combine": None}
    changed |= {"pipeline": "1f1b", "microbatches": 4}
    return argparse.Namespace(**{**vars(args), **changed})


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent is killed.

    Without it, workers would outlive a killed launcher and go on writing to the
    folder that a resumed run reads.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def worker(args: argparse.Namespace) -> None:
    """Be one rank of one configuration."""
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(dist.get_rank())
    try:
        corpus = shared_corpus(args, console)
        settings = settings_of(args, corpus, dist.get_world_size())
        result = finished(args.out, settings) if args.resume else None
        if result is None:
            result = train(args, corpus, console)
            console.line(f"sample:\n{result['sample']}")
        else:
            console.line(f"{name_of(result)} is finished: sha256 {result['sha256']}")
    finally:
        dist.destroy_process_group()
    if not console.quiet and not args.one_of_two:
        conclude([result], args.out)


def shared_corpus(args: argparse.Namespace, console: Console) -> Corpus:
    """Load the corpus on rank 0 and hand it to all; collective."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = load_corpus(args.corpus, console.line)
            if not args.one_of_two:
                console.line(f"corpus: {box[0].describe()}")
        except ValueError as error:
            box[0] = error
    dist.broadcast_object_list(box)
    if isinstance(box[0], ValueError):
        raise SystemExit(str(box[0]))
    corpus: Corpus = box[0]
    return corpus


def launch(args: argparse.Namespace) -> None:
    """Run the configurations one after the other, each in processes of its own."""
    console = Console(0)
    corpus = load_corpus(args.corpus, console.line)
    console.line(f"corpus: {corpus.describe()}")
    # The ranks read what was found here, and need not look for it again.
    args.corpus = args.out / "corpus.txt"
    write_atomically(args.corpus, corpus.text.encode())
    runs = {"main": args}
    if not args.alone:
        if args.parallel == "ddp":
            runs["pipeline"] = pipeline_of(args)
        runs["baseline"] = baseline_of(args)
    results = []
    for name, chosen in runs.items():
        folder = args.out / name
        settings = settings_of(chosen, corpus, RANKS)
        result = finished(folder, settings) if args.resume else None
        if result is None:
            console.line(f"== {name} ==")
            start_ranks(chosen, folder)
            result = finished(folder, settings)
            assert result is not None, "ranks that end well leave a result"
        else:
            console.line(f"{name} is finished: sha256 {result['sha256']}")
        results.append(result)
    conclude(results, args.out)


def start_ranks(args: argparse.Namespace, folder: Path) -> None:
    """Run one configuration under torchrun and wait for it.

    Raises:
        SystemExit: with torchrun's status if a rank failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(Path(__file__).resolve())]
    command += command_line({**vars(args), "out": folder, "one_of_two": True})
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, preexec_fn=die_with_parent)
    if done.returncode:
        raise SystemExit(done.returncode)


def command_line(values: dict[str, Any]) -> list[str]:
    """Return the flags that :func:`parse` turns into ``values``."""
    flags = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags


def conclude(results: list[dict[str, Any]], out: Path) -> None:
    """Print the table and the hashes, and draw the picture."""
    print()
    print(table(results))
    for result in results:
        print(f"sha256 of {name_of(result)}: {result['sha256']}")
    write_json(out / "report.json", results)
    picture = out / "report.png"
    if draw(results, picture):
        print(f"picture: {picture}")
    else:
        print("no picture: matplotlib is not installed (pip install matplotlib)")


def main() -> None:
    """Be a rank under torchrun, else start the ranks."""
    args = parse(sys.argv[1:])
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        worker(args)
        return
    try:
        launch(args)
    except ValueError as error:
        raise SystemExit(f"train_gpt: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped; --resume goes on from the last checkpoint") from None


if __name__ == "__main__":
    main()
