# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and what does not depend on a quiet machine holds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

pytestmark = pytest.mark.slow


def run(name: str, json_file: Path, *options: str) -> dict:
    command = [sys.executable, str(BENCHMARKS / name), "--quick", *options]
    command += ["--json", str(json_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(json_file.read_text())


def test_streams_of_exact_modes_do_not_drift(tmp_path: Path) -> None:
    picture = tmp_path / "drift.png"
    found = run(
        "reversible_drift.py", tmp_path / "f.json", "--check", f"--png={picture}"
    )
    assert {row["depth"] for row in found["rows"]} == {4, 8, 16}
    assert picture.stat().st_size > 0


def test_activation_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    found = run("reversible_memory.py", tmp_path / "f.json", "--check")
    by_depth = found["peak_bytes"]["node, none"]
    assert len(set(by_depth.values())) == 1
    assert by_depth["24"] < found["peak_bytes"]["plain"]["24"] / 5


def test_every_way_to_step_is_timed(tmp_path: Path) -> None:
    found = run("reversible_step.py", tmp_path / "f.json")
    assert {"plain", "checkpoint", "node, grid", "graph, none"} <= set(found["rounds"])
    assert all(len(times) == 3 for times in found["rounds"].values())


def test_larger_models_fit_under_a_cap(tmp_path: Path) -> None:
    found = run("memory_cap.py", tmp_path / "f.json", "--check")
    assert all(figure["holds"] for figure in found["figures"])


def test_a_trainer_stays_within_its_memory_contract(tmp_path: Path) -> None:
    found = run("trainer_memory.py", tmp_path / "f.json", "--check")
    assert set(found["depths"]) == {"8", "32", "64"}


def test_a_model_bigger_than_memory_trains_with_the_same_bits(tmp_path: Path) -> None:
    found = run("bigger_than_memory.py", tmp_path / "f.json", "--check")
    assert len(found["ours"]["losses"]) == 20
    assert found["ours"]["hash"] == found["store"]["hash"]


def test_every_kind_of_trainer_step_is_timed(tmp_path: Path) -> None:
    found = run("trainer_step.py", tmp_path / "f.json")
    assert len(found["seconds"]) == 7
    assert all(len(times) == 3 for times in found["seconds"].values())


def test_adasum_takes_fewer_steps_than_the_mean(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    found = run(
        "adasum_convergence.py", tmp_path / "f.json", "--check", f"--png={picture}"
    )
    assert {"sgd", "sm3", "adam"} <= set(found["rows"])
    assert picture.stat().st_size > 0


def test_adasum_is_timed_for_every_size_and_number_of_ranks(tmp_path: Path) -> None:
    found = run("adasum_reduce.py", tmp_path / "f.json")
    assert {row["ranks"] for row in found["rows"]} == {2, 4}
    assert all(row["ratio"] > 0 for row in found["rows"])


def test_adasum_kernels_are_timed(tmp_path: Path) -> None:
    found = run("adasum_kernels.py", tmp_path / "f.json")
    assert all(figure["value"] > 0 for figure in found["figures"])


@pytest.mark.parametrize("name", ["step", "overlap", "overhead"])
def test_adasum_hooks_are_timed_in_training(name: str, tmp_path: Path) -> None:
    found = run(f"adasum_{name}.py", tmp_path / "f.json")
    memory = [figure for figure in found["figures"] if "peak" in figure["name"]]
    assert len(memory) == (name == "overhead")
    assert all(figure["holds"] for figure in memory)


def test_messages_and_steps_of_a_pipeline_are_timed(tmp_path: Path) -> None:
    found = run("pipeline_messages.py", tmp_path / "f.json")
    assert len(found["figures"]) == 2
    found = run("pipeline_threads.py", tmp_path / "f.json")
    assert found["figures"][0]["value"] > 0
    found = run("pipeline_overhead.py", tmp_path / "f.json")
    assert all(figure["value"] > 0.5 for figure in found["figures"])


def test_every_plan_has_its_formula(tmp_path: Path) -> None:
    found = run("pipeline_bubble.py", tmp_path / "f.json", "--check")
    assert found["simulated"]["cases"].keys() >= {"gpipe", "interleaved", "zbv"}
    assert all(count > 20 for count in found["simulated"]["cases"].values())


def test_long_plans_take_little_memory(tmp_path: Path) -> None:
    found = run("plan_scale.py", tmp_path / "f.json")
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert figures["GiB of memory, p = 256, m = 2048"]["value"] < 0.5
    assert found["large"]["actions"] > 3e6


def test_no_named_plan_beats_a_search(tmp_path: Path) -> None:
    found = run("plan_auto.py", tmp_path / "f.json")
    figures = {figure["name"]: figure for figure in found["figures"]}
    name = "makespan over the best named kind that fits, largest"
    assert figures[name]["holds"] and figures["searches compared"]["value"] > 20


def test_slow_links_and_early_steps_of_a_pipeline_are_measured(tmp_path: Path) -> None:
    measured, on_paper = run("pipeline_overlap.py", tmp_path / "f.json")["figures"]
    assert measured["value"] > 1 and on_paper["holds"]
    found = run("pipeline_validate.py", tmp_path / "f.json")
    assert len(found["seconds"]["zb_h2"]["later"][0]) == 4
    assert all(figure["value"] > 0 for figure in found["figures"])


def test_fault_drills_end_as_asked(tmp_path: Path) -> None:
    found = run("pipeline_faults.py", tmp_path / "f.json", "--check")
    assert {drill["fault"] for drill in found["drills"]} == {
        "raise", "exit", "kill", "stop",
    }  # fmt: skip
    assert not any(drill["wrong"] for drill in found["drills"])
