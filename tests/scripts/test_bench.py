"""The table of all benches: what it says of what was found, and that a bench can be run for it."""

import json
import math
import pathlib
import subprocess
import sys

from scripts import bench
from scripts.benches import results, table, turns
from tests.conftest import ROOT

FOUND = [
    results.Ratio("loop", "mlp", "ours / Orbit", [1.0, 1.2, 1.4], at_least=1.0, note="1 ms / 1.2 ms"),
    results.Ratio("watching", "cnn", "finite / nothing", [1.05, 1.02, 1.04], at_most=1.03),
    results.Ratio("audit", "a|b", "audit / cat", [2.0]),
    results.Ratio("start", "all of it", "-", [math.nan], at_least=0.0),
]
LINES = [
    "| loop | mlp | ours / Orbit | 1.20 | 1.10 to 1.30 | >= 1 | kept | 1 ms / 1.2 ms |",
    "| watching | cnn | finite / nothing | 1.04 | 1.03 to 1.04 | <= 1.03 | MISSED |  |",
    "| audit | a\\|b | audit / cat | 2.00 | 2.00 to 2.00 |  |  |  |",
    "| start | all of it | - | - | - | >= 0 | NOT MEASURED |  |",
]


def test_a_line_a_ratio_with_quartiles_and_verdict(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "found.jsonl")
    results.write(path, FOUND)
    text = table.render({"all": results.read(path)}, [("cores", "2")], "2026-11-30").splitlines()
    assert [line for line in text if line in LINES] == LINES
    assert "1 of 3 bounds are kept." in text
    assert "| cores | 2 |" in text and "| measured | 2026-11-30 |" in text


def test_contenders_have_to_lose_alike() -> None:
    alike = {"ours": [2.0, 1.5], "theirs": [2.0, 1.50001]}
    assert turns.lose_alike(alike, "theirs", 1e-4)
    assert not turns.lose_alike(alike | {"other": [2.0, 1.6]}, "theirs", 1e-4)
    assert not turns.lose_alike(alike | {"other": [2.0, math.nan]}, "theirs", 1e-4)


def test_the_cheapest_bench_fills_the_table(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "BENCHMARKS.md"
    flags = ["--quick", "--only=audit", f"--out={out}", f"--results={tmp_path}"]
    command = [sys.executable, "-m", "scripts.bench", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # 1: a bound is missed, on a machine that does other work
    lines = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| audit |")]
    assert len(lines) == 2 and all(float(line[3]) > 0 for line in lines), done.stdout
    assert "with --quick: few rounds" in out.read_text()


def test_a_bench_that_dies_is_in_the_table_with_what_it_found(tmp_path: pathlib.Path, monkeypatch) -> None:
    kept = json.dumps({"bench": "loop", "what": "mlp", "between": "ours / Orbit", "values": [1.0, 1.0]})
    dies = f"import sys; open(sys.argv[1].partition('=')[2], 'w').write({kept!r}); 1 / 0"
    run = subprocess.run
    monkeypatch.setattr(
        bench.subprocess, "run", lambda command, **_: run([sys.executable, "-c", dies, command[3]], capture_output=True)
    )
    bench.run("loop", tmp_path / "loop.jsonl", [])
    whole, rest = results.read(str(tmp_path / "loop.jsonl"))
    assert whole.is_kept and whole.between == "ours / Orbit"
    assert not rest.is_kept and rest.what == "the rest of it" and rest.note == "the bench ended with 1"
