# SPDX-License-Identifier: Apache-2.0
"""The main job through its own launcher, with models of a few thousand weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import train_gpt

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "train_gpt.py"
SIZES = "--width 32 --depth 2 --heads 2 --context 16 --batch 2".split()
TIMEOUT = 150


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    words = [f"{a}{b}{c}" for a in "bdfglmt" for b in "aeiou" for c in "knrst"]
    file.write_text(" ".join(words * 30), encoding="utf-8")
    return file


def command(corpus: Path, out: Path, *flags: object) -> list[str]:
    where = ["--corpus", str(corpus), "--out", str(out)]
    return [sys.executable, str(SCRIPT), *SIZES, *where, *map(str, flags)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def train(corpus: Path, out: Path, *flags: object) -> str:
    return finish(command(corpus, out, *flags))


def result_of(out: Path, name: str = "main") -> dict[str, Any]:
    return json.loads((out / name / "result.json").read_text())


def check(result: dict[str, Any], steps: int) -> None:
    assert [entry["step"] for entry in result["log"]] == list(range(1, steps + 1))
    assert result["log"][-1]["loss"] < result["log"][0]["loss"]
    assert result["held_out_log"][-1]["step"] == steps
    assert len(result["sha256"]) == 64 and len(result["sample"]) > 100
    for rank in result["ranks"]:
        assert rank["peak_bytes"] > rank["built_bytes"] > 0
        assert 0 < rank["kept_bytes"] <= rank["live_bytes"]
        assert rank["trace"] and rank["state_bytes"] > 0


@pytest.fixture(scope="module")
def compared(corpus, tmp_path_factory) -> tuple[Path, str]:
    """The default configuration, its pipeline and the baseline, undisturbed."""
    out = tmp_path_factory.mktemp("compared")
    return out, train(corpus, out, "--steps", 120, "--save-every", 5)


def test_three_configurations_and_all_that_is_written(compared):
    out, printed = compared
    main, baseline = result_of(out), result_of(out, "baseline")
    pipeline = result_of(out, "pipeline")
    for result in (main, pipeline, baseline):
        check(result, 120)
        assert result["sha256"] in printed
    same = set(main["settings"]) - {"optimizer", "blocks", "combine", "lr"}
    assert all(main["settings"][k] == baseline["settings"][k] for k in same)
    assert main["settings"]["combine"] == "adasum"
    assert pipeline["settings"]["parallel"] == "pipeline"
    stages = [rank["parameters"] for rank in pipeline["ranks"]]
    assert sum(stages) == main["ranks"][0]["parameters"] and all(stages)
    assert main["ranks"][0]["parameters"] == baseline["ranks"][0]["parameters"]
    assert main["ranks"][0]["state_bytes"] < baseline["ranks"][0]["state_bytes"] / 5
    assert main["ranks"][0]["kept_bytes"] < baseline["ranks"][0]["kept_bytes"]
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((out / "report.json").read_text())) == 3
    heading = "step     loss held-out       lr  tokens/s  peak MiB  state KiB"
    for text in (heading, "optimizer state of a rank", "sample:"):
        assert text in printed
    assert printed.count("corpus: ") == 1


def test_a_finished_run_is_not_trained_again(compared, corpus):
    out, _ = compared
    before = (out / "main" / "result.json").stat().st_mtime_ns
    printed = train(corpus, out, "--steps", 120, "--resume")
    assert f"main is finished: sha256 {result_of(out)['sha256']}" in printed
    assert "baseline is finished" in printed
    assert (out / "main" / "result.json").stat().st_mtime_ns == before


def test_resume_with_other_settings_is_refused(compared, corpus):
    out, _ = compared
    done = subprocess.run(
        command(corpus, out, "--steps", 121, "--resume"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment(),
    )
    assert done.returncode != 0
    assert "expected steps = 120 as in" in done.stderr
    assert "but got 121 (argument '--resume')" in done.stderr


def processes_of(out: Path) -> list[int]:
    """Return the processes whose command line names a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(out).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def kill_after_first_checkpoint(start: list[str], out: Path, name: str = "main") -> int:
    """Start a run, kill its launcher with -9, and return the step it reached."""
    checkpoint = out / name / "checkpoint.pt"
    launcher = subprocess.Popen(
        start,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    deadline = time.monotonic() + TIMEOUT
    while not checkpoint.exists():
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    while processes_of(out):
        assert time.monotonic() < deadline, "the ranks outlive their launcher"
        time.sleep(0.01)
    return int(torch.load(checkpoint, weights_only=True)["step"])


def test_killed_and_resumed_ends_on_the_same_bits(compared, corpus, tmp_path):
    flags = ("--steps", 120, "--save-every", 5, "--alone")
    step = kill_after_first_checkpoint(command(corpus, tmp_path, *flags), tmp_path)
    assert 0 < step < 120
    assert not (tmp_path / "main" / "result.json").exists()
    printed = train(corpus, tmp_path, *flags, "--resume")
    assert f"resumed at step {step} of 120" in printed
    undisturbed, resumed = result_of(compared[0]), result_of(tmp_path)
    assert resumed["sha256"] == undisturbed["sha256"]
    assert resumed["held_out_log"] == undisturbed["held_out_log"]
    for ours, theirs in zip(resumed["log"], undisturbed["log"], strict=True):
        assert (ours["step"], ours["loss"]) == (theirs["step"], theirs["loss"])
    assert resumed["sample"] == undisturbed["sample"]


def test_a_new_run_forgets_the_old_one(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    checkpoints.forget(tmp_path)
    assert checkpoints.finished(tmp_path, {}) is None
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_with_other_settings_is_refused(tmp_path):
    torch.save({"settings": {"seed": 1}}, tmp_path / "checkpoint.pt")
    assert checkpoints.finished(tmp_path, {"seed": 1}) is None
    with pytest.raises(ValueError, match=r"expected seed = 1 as in .* but got 2"):
        checkpoints.finished(tmp_path, {"seed": 2})


def test_pipeline(corpus, tmp_path):
    flags = ("--parallel", "pipeline", "--microbatches", 2, "--alone")
    printed = train(corpus, tmp_path, *flags, "--steps", 20)
    result = result_of(tmp_path)
    check(result, 20)
    assert result["sha256"] in printed
    assert result["settings"]["combine"] is None


def test_any_schedule_trains_the_same_model(corpus, tmp_path):
    """A step first and a norm later, two stages of a rank, and a trace."""
    same = ("--parallel", "pipeline", "--steps", 12, "--clip", 0.5, "--alone")
    train(corpus, tmp_path / "a", *same, "--depth", 4)
    flags = ("--pipeline", "zbv", "--post-validate", "--trace")
    printed = train(corpus, tmp_path / "b", *same, "--depth", 4, *flags)
    # Microbatches, not stages, decide the bits; the blocks are cut twice as fine.
    plain, zbv = (result_of(tmp_path / name) for name in "ab")
    for a, b in zip(plain["log"], zbv["log"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert "zbv: " in printed and "largest stage" in printed
    events = json.loads((tmp_path / "b" / "main" / "trace.json").read_text())
    assert any("3F0" in str(event) for event in events["traceEvents"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--parallel pipeline --pipeline interleaved --depth 4 --post-validate",
        "--parallel pipeline --pipeline zb_h2 --microbatches 2 --post-validate",
        "--optimizer sm3 --blocks checkpoint --combine mean",
        "--optimizer sm3 --blocks plain --combine adasum",
        "--optimizer adamw --blocks reversible --combine adasum",
        "--optimizer adamw --blocks checkpoint --combine adasum",
        "--optimizer adamw --blocks reversible --combine delta",
        "--optimizer adamw --parallel pipeline --blocks plain",
        "--optimizer sm3 --parallel pipeline --blocks checkpoint",
    ],
)
def test_other_combinations(corpus, tmp_path, flags):
    train(corpus, tmp_path, *flags.split(), "--steps", 20, "--alone")
    check(result_of(tmp_path), 20)


@pytest.mark.slow
def test_killed_pipeline_resumes_on_the_same_bits(corpus, tmp_path):
    flags = ("--parallel", "pipeline", "--steps", 120, "--save-every", 5)
    flags += ("--alone",)
    train(corpus, tmp_path / "whole", *flags)
    killed = tmp_path / "killed"
    start = command(corpus, killed, *flags)
    assert 0 < kill_after_first_checkpoint(start, killed) < 120
    train(corpus, killed, *flags, "--resume")
    assert result_of(killed)["sha256"] == result_of(tmp_path / "whole")["sha256"]


def torchrun(ranks: int, corpus: Path, out: Path, *flags: object) -> list[str]:
    runner = ["-m", "torch.distributed.run", "--standalone"]
    script = command(corpus, out, *flags)
    return [sys.executable, *runner, f"--nproc-per-node={ranks}", *script[1:]]


def finish(start: list[str]) -> str:
    done = subprocess.run(
        start, capture_output=True, text=True, timeout=TIMEOUT, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "ranks, combine",
    [
        (2, "delta"),
        pytest.param(3, "delta", marks=pytest.mark.slow),
        pytest.param(2, "adasum", marks=pytest.mark.slow),
        pytest.param(3, "adasum", marks=pytest.mark.slow),
    ],
)
def test_adasum_end_to_end_on_any_number_of_ranks(corpus, tmp_path, ranks, combine):
    flags = ("--combine", combine, "--steps", 100, "--save-every", 50)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    # It fails by itself where replicas end on different bits.
    finish(torchrun(ranks, corpus, whole, *flags))
    result = result_of(whole, "")
    check(result, 100)
    assert result["settings"]["ranks"] == ranks
    start = torchrun(ranks, corpus, killed, *flags)
    assert kill_after_first_checkpoint(start, killed, "") == 50
    assert "resumed at step 50 of 100" in finish([*start, "--resume"])
    resumed = result_of(killed, "")
    assert resumed["sha256"] == result["sha256"]
    assert [e["loss"] for e in resumed["log"]] == [e["loss"] for e in result["log"]]


@pytest.mark.slow
def test_directly_under_torchrun(corpus, tmp_path):
    printed = finish(torchrun(2, corpus, tmp_path, "--steps", 10))
    assert "worst rank" in printed
    assert json.loads((tmp_path / "result.json").read_text())["log"]
    assert (tmp_path / "report.png").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--parallel pipeline --combine mean", "--combine is for --parallel ddp"),
        ("--microbatches 2", "--microbatches is for --parallel pipeline"),
        ("--pipeline zbv", "--pipeline is for --parallel pipeline"),
        ("--post-validate", "--post-validate is for --parallel pipeline"),
        ("--parallel pipeline --chunks 2", "expected 1 chunk for kind 1f1b"),
        ("--parallel pipeline --microbatches 0", "expected microbatches"),
        ("--steps 0", "--steps: expected at least 1"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        train_gpt.parse(flags.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--parallel pipeline --lr 0.02",
        "--parallel pipeline --pipeline zbv --clip 1.0 --post-validate --trace",
        "--optimizer adamw --resume",
    ],
)
def test_command_line_gives_back_the_arguments(flags):
    args = train_gpt.parse(flags.split())
    assert train_gpt.parse(train_gpt.command_line(vars(args))) == args
    baseline = train_gpt.baseline_of(args)
    assert train_gpt.parse(train_gpt.command_line(vars(baseline))) == baseline
    assert (baseline.optimizer, baseline.blocks) == ("adamw", "plain")
    pipeline = train_gpt.pipeline_of(args)
    assert train_gpt.parse(train_gpt.command_line(vars(pipeline))) == pipeline
