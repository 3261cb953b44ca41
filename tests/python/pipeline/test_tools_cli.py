# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, writes and returns."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.pipeline_traces import synthetic

from torch_sm3.pipeline import Costs, Schedule, plan, plot, simulate
from torch_sm3.pipeline.__main__ import main

Out = pytest.CaptureFixture[str]

# Each rank waits for a message that the other sends later.
STUCK = """\
schedule 1 kind=hand ranks=2 stages=2 microbatches=1 placement=loop
rank 0: 0RECV_B0 0F0 0B0 0SEND_F0
rank 1: 1RECV_F0 1F0 1B0 1SEND_B0
"""


@pytest.fixture
def zbv(tmp_path: Path) -> str:
    path = tmp_path / "s.csv"
    assert main(["plan", "--kind", "zbv", "-p", "4", "-m", "8", "-o", str(path)]) == 0
    return str(path)


@pytest.fixture
def stuck(tmp_path: Path) -> str:
    path = tmp_path / "stuck.txt"
    path.write_text(STUCK)
    return str(path)


def usage_error(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def printed(capsys: Out) -> Any:
    return json.loads(capsys.readouterr().out)


# --- plan ------------------------------------------------------------------


def test_plan_prints_the_text(capsys: Out) -> None:
    assert main(["plan", "--kind", "1f1b", "-p", "2", "-m", "3"]) == 0
    assert capsys.readouterr().out == plan("1f1b", 2, 3).text


def test_plan_writes_csv_and_text_that_read_back(tmp_path: Path, capsys: Out) -> None:
    for name in ("s.csv", "s.txt"):
        path = tmp_path / name
        line = ["plan", "--kind", "interleaved", "-p", "2", "-m", "4", "--chunks", "2"]
        assert main([*line, "--lower", "-o", str(path)]) == 0
        assert capsys.readouterr().out == ""
        wanted = plan("interleaved", 2, 4, chunks=2).lower()
        assert Schedule.load(path) == wanted


def test_plan_hands_every_option_on(tmp_path: Path, capsys: Out) -> None:
    line = ["plan", "--kind", "1f1b", "-p", "3", "-m", "9", "--costs", "1,1,1"]
    assert main([*line, "--link-cost", "0.5", "--json"]) == 0
    wanted = plan("1f1b", 3, 9, costs=Costs(1, 1, 1), link_cost=0.5)
    assert printed(capsys)["text"] == wanted.text != plan("1f1b", 3, 9).text
    assert main([*line, "--warmup", "2"]) == 0
    assert capsys.readouterr().out == plan("1f1b", 3, 9, warmup=2).text
    assert main([*line, "--split", "1", "--via", "direct"]) == 0
    assert capsys.readouterr().out == plan("1f1b", 3, 9, split=1, via="direct").text
    costs = Costs(activation_bytes=10, boundary_bytes=4)
    costs.save(tmp_path / "costs.json")
    line[-1] = str(tmp_path / "costs.json")
    found = []
    for pending in (1, 2, 4):
        options = ["--memory-limit", "52", "--max-pending", str(pending)]
        assert main([*line, *options]) == 0
        found.append(capsys.readouterr().out)
        wanted = plan("1f1b", 3, 9, costs=costs, memory_limit=52, max_pending=pending)
        assert found[-1] == wanted.text
    assert main([*line, "--memory-limit", "52"]) == 0
    assert capsys.readouterr().out == found[1] != found[2]
    line = ["plan", "--kind", "interleaved", "-p", "2", "-m", "6", "--chunks", "2"]
    assert main([*line, "--group-size", "3"]) == 0
    wanted = plan("interleaved", 2, 6, chunks=2, group_size=3)
    assert capsys.readouterr().out == wanted.text


def test_plan_as_json(capsys: Out) -> None:
    assert main(["plan", "--kind", "zbv", "-p", "2", "-m", "4", "--json"]) == 0
    found = printed(capsys)
    assert found["kind"] == "zbv" and found["stages"] == 4
    assert found["placement"] == [0, 1, 1, 0]
    assert Schedule.parse(found["text"]) == plan("zbv", 2, 4)


def test_plan_of_kind_auto_tells_what_it_looked_at(tmp_path: Path, capsys: Out) -> None:
    line = ["plan", "--kind", "auto", "-p", "2", "-m", "4", "--costs", "1,1,1"]
    assert main([*line, "--json"]) == 0
    found = printed(capsys)
    chosen = [x for x in found["alternatives"] if x["chosen"]]
    assert len(chosen) == 1 and not chosen[0]["refused"]
    fitting = [x["makespan"] for x in found["alternatives"] if not x["refused"]]
    assert chosen[0]["makespan"] == min(fitting)
    assert main([*line, "-o", str(tmp_path / "s.txt")]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [x for x in shown.err.splitlines() if x.startswith("*")] != []
    assert (tmp_path / "s.txt").read_text() == found["text"]


def test_plan_of_one_rank_is_that_row(capsys: Out) -> None:
    line = ["plan", "--kind", "zb_h1", "-p", "3", "-m", "4"]
    assert main([*line, "--rank", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[2] == plan("zb_h1", 3, 4).text.splitlines()[2]
    assert rows[1] == "rank 0:" and rows[3] == "rank 2:"
    assert usage_error(*line, "--rank", "3") == 2


# --- verify ----------------------------------------------------------------


def test_verify_passes_a_planned_schedule(zbv: str, capsys: Out) -> None:
    assert main(["verify", zbv, "--max-pending", "1"]) == 0
    out = capsys.readouterr().out
    assert out == "valid: zbv, 4 ranks, 8 stages, 8 microbatches\n"
    assert main(["verify", zbv, "--links", "blocking", "--json"]) == 0
    found = printed(capsys)
    assert found["valid"] is True and len(found["peak_bytes"]) == 4


def test_verify_shows_where_ranks_are_stuck(stuck: str, capsys: Out) -> None:
    assert main(["verify", stuck]) == 1
    out = capsys.readouterr().out
    assert out.startswith("invalid (")
    assert "1RECV_F0" in out or "1F0" in out
    assert main(["verify", stuck, "--json"]) == 1
    found = printed(capsys)
    assert found["valid"] is False
    assert found["message"] and found["grid"]


def test_verify_counts_memory(tmp_path: Path, zbv: str, capsys: Out) -> None:
    costs = tmp_path / "costs.json"
    Costs(1, 1, 1, activation_bytes=100).save(costs)
    line = ["verify", zbv, "--costs", str(costs), "--json"]
    assert main(line) == 0
    peaks = printed(capsys)["peak_bytes"]
    assert main([*line, "--memory-limit", str(max(peaks))]) == 0
    capsys.readouterr()
    assert main([*line, "--memory-limit", str(max(peaks) - 1)]) == 1
    assert printed(capsys)["rule"] == "memory"


def test_a_file_that_is_no_schedule_is_invalid(tmp_path: Path, capsys: Out) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_text(STUCK.replace("0B0", "0X0"))
    assert main(["verify", str(bad)]) == 1
    assert "'0X0'" in capsys.readouterr().err
    assert main(["verify", str(bad), "--json"]) == 1
    found = printed(capsys)
    assert found["valid"] is False and "'0X0'" in found["message"]


@pytest.mark.parametrize("content", [b"\xff\xfe\0s", bytes(range(256)), b"", b"\n"])
@pytest.mark.parametrize("command", ["verify", "simulate", "plot"])
def test_other_bytes_are_no_schedule(
    tmp_path: Path, capsys: Out, command: str, content: bytes
) -> None:
    (tmp_path / "s").write_bytes(content)
    line = [command, str(tmp_path / "s")]
    assert main([*line, "-o", "s.svg"] if command == "plot" else line) == 1
    assert capsys.readouterr().err.startswith("Schedule")


# --- simulate --------------------------------------------------------------


def test_simulate_prints_and_returns_the_same_numbers(zbv: str, capsys: Out) -> None:
    line = ["simulate", zbv, "--costs", "1,2,3", "--link-latency", "0.1"]
    assert main([*line, "--json"]) == 0
    found = printed(capsys)
    ran = simulate(plan("zbv", 4, 8), Costs(1, 2, 3, latency=0.1))
    assert found["makespan"] == ran.makespan
    assert found["busy"] == list(ran.busy) and found["idle"] == list(ran.idle)
    assert main(line) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"makespan {ran.makespan:.6g}" in lines[1]
    assert len(lines) == 3 + 4
    assert float(lines[3].split()[2]) == pytest.approx(ran.idle[0], rel=1e-4)


def test_simulate_reports_bubble_and_memory_of_each_rank(
    tmp_path: Path, capsys: Out
) -> None:
    path = tmp_path / "s.txt"
    path.write_text(plan("1f1b", 4, 8).text)
    assert main(["simulate", str(path), "--costs", "1,1,1"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()[2:]
    assert head.endswith("peak activations")
    for rank, row in enumerate(rows):
        # (p - 1) T of (m + p - 1) T, and p - r microbatches in flight.
        found = row.split()
        assert found[:3] == [str(rank), "24", "9"]
        assert found[-3:] == ["27.3", "%", str(4 - rank)]
    assert main(["simulate", str(path), "--json"]) == 0
    found = printed(capsys)
    assert found["peak_bytes"] is None and found["peak_activations"] == [4, 3, 2, 1]
    Costs(1, 1, 1, activation_bytes=2**20).save(tmp_path / "c.json")
    line = ["simulate", str(path), "--costs", str(tmp_path / "c.json")]
    assert main(line) == 0
    head, first, *_ = capsys.readouterr().out.splitlines()[2:]
    assert head.endswith("peak bytes") and float(first.split()[-1]) > 4e6
    assert main([*line, "--json"]) == 0
    found = printed(capsys)
    assert found["peak_activations"] is None
    assert found["peak_bytes"] == [k * 2**20 for k in (4, 3, 2, 1)]


def test_chunks_count_in_parts_of_a_rank(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "s.txt"
    path.write_text(plan("interleaved", 3, 6, chunks=3).text)
    assert main(["simulate", str(path), "--json"]) == 0
    # min(m v, 2 (p - 1 - r) + (v - 1) p + 1) of v chunks.
    wanted = [pytest.approx((2 * (2 - r) + 7) / 3) for r in range(3)]
    assert printed(capsys)["peak_activations"] == wanted


def test_simulate_refuses_what_cannot_run(stuck: str, capsys: Out) -> None:
    assert main(["simulate", stuck]) == 1
    err = capsys.readouterr().err
    assert "waits at" in err and "step  rank 0" in err and "[" in err


def test_an_order_of_computation_that_cannot_run_is_shown_too(
    tmp_path: Path, capsys: Out
) -> None:
    # Nothing can be added to it, so no command gets further than that.
    text = "schedule 1 kind=x ranks=2 stages=2 microbatches=2 placement=loop\n"
    text += "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0\n"
    path = tmp_path / "s.txt"
    path.write_text(text)
    for line in (["simulate"], ["plot", "-o", str(tmp_path / "s.svg")], ["verify"]):
        assert main([line[0], str(path), *line[1:]]) == 1
        said = capsys.readouterr()
        assert "0     0F0     [1F1]\n" in said.out + said.err, line


def test_a_group_that_loses_time_is_a_line_of_warning(capsys: Out) -> None:
    line = "plan --kind interleaved -p 4 -m 5 --chunks 2 --group-size 4 --json"
    assert main(line.split()) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["kind"] == "interleaved"
    assert said.err == (
        "warning: plan: group_size 4 leaves a bubble of 9, group_size 5 one of 4.5\n"
    )


def test_costs_with_a_full_backward_and_from_a_file(
    tmp_path: Path, capsys: Out
) -> None:
    path = tmp_path / "s.txt"
    path.write_text(plan("1f1b", 2, 4).text)
    assert main(["simulate", str(path), "--costs", "1,1,1,5", "--json"]) == 0
    assert printed(capsys)["busy"] == [24, 24]
    Costs([1, 2], [1, 2], [1, 2]).save(tmp_path / "c.json")
    line = ["simulate", str(path), "--costs", str(tmp_path / "c.json"), "--json"]
    assert main(line) == 0
    assert printed(capsys)["busy"] == [12, 24]


def test_a_schedule_comes_through_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(plan("gpipe", 2, 2).text))
    assert main(["verify", "-"]) == 0
    assert "gpipe" in capsys.readouterr().out


# --- plot ------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plot_writes_a_picture(tmp_path: Path, zbv: str, suffix: str) -> None:
    path = tmp_path / f"s.{suffix}"
    assert main(["plot", zbv, "-o", str(path), "--costs", "1,1,1", "--messages"]) == 0
    start = path.read_bytes()[:8]
    assert start == (b"<?xml ve" if suffix == "svg" else b"\x89PNG\r\n\x1a\n")


def test_plot_draws_a_trace(tmp_path: Path) -> None:
    synthetic(plan("1f1b", 2, 3), Costs(0.01, 0.01, 0.01)).save(tmp_path / "t.json")
    line = ["plot", str(tmp_path / "t.json"), "-o", str(tmp_path / "t.svg")]
    assert main([*line, "--title", "my step"]) == 0
    svg = (tmp_path / "t.svg").read_text()
    assert ">my step<" in svg and ">rank 1 measured<" in svg


def test_plot_hands_links_costs_and_memory_on(tmp_path: Path, zbv: str) -> None:
    path = tmp_path / "s.svg"
    line = ["plot", zbv, "-o", str(path), "--costs", "1,2,3", "--link-latency", "0.5"]
    assert main([*line, "--links", "blocking", "--memory"]) == 0
    costs = Costs(1, 2, 3, latency=0.5)
    ran = simulate(plan("zbv", 4, 8), costs, links="blocking")
    assert path.read_text() == plot(ran, memory=True).svg()


def test_plot_predicts_a_trace_with_the_costs_it_is_given(tmp_path: Path) -> None:
    trace = synthetic(plan("1f1b", 2, 3), Costs(0.01, 0.01, 0.01))
    trace.save(tmp_path / "t.json")
    costs = Costs(0.02, 0.01, 0.01)
    costs.save(tmp_path / "c.json")
    line = ["plot", str(tmp_path / "t.json"), "-o", str(tmp_path / "t.svg")]
    assert main([*line, "--costs", str(tmp_path / "c.json")]) == 0
    assert (tmp_path / "t.svg").read_text() == plot(trace, costs=costs).svg()


# --- usage -----------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["draw"],
        ["plan"],
        ["plan", "--kind", "1f1b", "-p", "0", "-m", "1"],
        ["plan", "--kind", "1fb1", "-p", "2", "-m", "1"],
        ["plan", "--kind", "1f1b", "-p", "2", "-m", "1", "--chunks", "2"],
        ["plan", "--kind", "1f1b", "-p", "2", "-m", "1", "--costs", "1,2"],
        ["plan", "--kind", "1f1b", "-p", "2", "-m", "1", "--costs", "a,b,c"],
        ["verify"],
        ["verify", "missing.csv"],
        ["verify", "{zbv}", "--links", "slow"],
        ["verify", "{zbv}", "--max-pending", "0"],
        ["verify", "{zbv}", "--memory-limit", "8"],
        ["verify", "{zbv}", "--memory-limit", "8", "--costs", "1,1,1"],
        "plan --kind 1f1b -p 2 -m 1 --costs 1,1,1 --memory-limit 8".split(),
        ["simulate", "{zbv}", "--costs", "missing.json"],
        ["plot", "{zbv}"],
        ["plot", "{zbv}", "-o", "s.pdf"],
        ["plot", "{zbv}", "-o", "s.svg", "--width", "1"],
        ["plot", "missing.json", "-o", "s.svg"],
        ["plot", "{zbv}", "-o", "s.svg", "--width", "inf"],
        ["plot", "{zbv}", "-o", "s.svg", "--link-latency", "1e308"],
        ["plan", "--kind", "1f1b", "-p", "2", "-m", str(2**64)],
        ["simulate", "{zbv}", "--max-pending", str(2**64)],
    ],
)
def test_wrong_usage_exits_with_2(line: list[str], zbv: str, capsys: Out) -> None:
    capsys.readouterr()
    assert usage_error(*(zbv if part == "{zbv}" else part for part in line)) == 2
    assert "error: " in capsys.readouterr().err


def test_help_names_commands_options_and_examples(capsys: Out) -> None:
    assert usage_error("--help") == 0
    out = capsys.readouterr().out
    for word in (
        "plan",
        "verify",
        "simulate",
        "plot",
        "exit status: 0 good, 1 invalid",
    ):
        assert word in out
    assert usage_error("plan", "--help") == 0
    out = capsys.readouterr().out
    assert "--group-size" in out and "interleaved" in out
    assert "python -m torch_sm3.pipeline plan --kind zbv -p 4 -m 8 -o s.csv" in out


def test_the_module_runs(tmp_path: Path) -> None:
    def run(*line: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch_sm3.pipeline", *line]
        return subprocess.run(command, text=True, capture_output=True, cwd=tmp_path)

    line = ["plan", "--kind", "zbv", "-p", "4", "-m", "8", "--costs", "1,1,1"]
    assert run(*line, "-o", "s.csv").returncode == 0
    assert run("verify", "s.csv", "--max-pending", "1").returncode == 0
    (tmp_path / "bad.txt").write_text(STUCK)
    assert run("verify", "bad.txt").returncode == 1
    assert run("verify").returncode == 2


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    line = ["plan", "--kind", "gpipe", "-p", "4", "-m", "50000"]
    with subprocess.Popen(
        [sys.executable, "-m", "torch_sm3.pipeline", *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.read(10) == b"schedule 1"
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0
