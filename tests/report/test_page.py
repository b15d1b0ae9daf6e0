"""The page of one run and of several: what it tells, what it must not, and what files that are odd do to it."""

import base64
import hashlib
import json
import pathlib
import re

import pytest

from tests.report import made
from trainer.report import one, several
from trainer.report.left import look
from trainer.watch import status

RUN_FILES = (
    "config.json",
    "provenance.json",
    "receipt.json",
    "examples.json",
    "metrics.jsonl",
    "alerts.jsonl",
    "status.json",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return made.run(tmp_path_factory.mktemp("runs") / "cifar")


def page_of(path: pathlib.Path) -> str:
    return one.page(look(str(path)))


def keys(page: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', page)


def part(page: str, key: str) -> str:
    """A section as text."""
    found = re.search(rf'<section id="{key}">(.*?)</section>', page, re.DOTALL)
    return re.sub(r"<[^>]+>", " ", found[1]) if found else ""


def test_it_tells_how_the_run_went(run: pathlib.Path) -> None:
    page = page_of(run)
    assert keys(page) == [
        "state", "learning", "speed", "time", "alerts", "predictions", "worst", "options", "provenance", "checkpoints",
    ]  # fmt: skip
    state = " ".join(part(page, "state").split())
    assert "finished" in state
    assert "best accuracy 0.8934 evaluation of step 2,400, loss 0.5365" in state
    assert "steps 2,400" in state and "over 3 starts" in state and "75.4%" in state
    assert "stopped, to go on later (75)" in part(page, "time") and "killed" in part(page, "time")
    assert "still at work" not in page, "of a start that another came after"
    assert "the output of layer conv_2" in part(page, "alerts")
    assert "855 of 925 are right (92.4%)" in part(page, "predictions")
    assert re.search(r"learning_rate +0.002 +0.001", part(page, "options"))
    assert "1e0711bc301a2853" in part(page, "provenance") and "2.20.0" in part(page, "provenance")
    assert re.search(r"2,400 .* 11.4 +loss 0.52, accuracy 0.89 .* 2,200", part(page, "checkpoints"))
    learning = page[page.index('id="learning"') : page.index('id="speed"')]
    assert learning.count('class="sign restart"') == 1 + 2 * 6, "in the legend, and in each picture of six"
    assert learning.count('class="sign alert"') == 1 + 3 * 6, "the alert that it has finished is none"
    assert all(re.findall(r'<svg [^>]*class="plot[^>]*aria-label="[^"]+"', page))


def test_what_users_write_is_text_and_secrets_are_not_there(run: pathlib.Path) -> None:
    page = page_of(run)
    assert made.EVIL not in page
    assert page.count("&lt;script&gt;document.title=") >= 4, "of an alert, its marks, a class and a feature"
    assert made.SECRET not in page
    assert "example.com" not in page, "no image but one that is in the file"
    assert page.count("data:image/png;base64,") == 9
    assert "<b>markup" not in page


def test_it_may_load_nothing_and_run_its_own_script_only(run: pathlib.Path) -> None:
    page = page_of(run)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1].replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; img-src data:;")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert not re.search(r' (style|on\w+)="', page), "which the policy would refuse"


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize(
    "content", [None, "", "{", "[1]", "{}", '{"starts": [{}], "step": "x", "worst": [{}], "state": 3}']
)
def test_no_file_is_needed_and_none_can_break_it(tmp_path: pathlib.Path, name: str, content: str | None) -> None:
    path = made.run(tmp_path / "run")
    (path / name).unlink()
    if content is not None:
        (path / name).write_text(content)
    page = page_of(path)
    assert {"state", "learning", "time", "alerts", "options"} <= set(keys(page))
    assert "0.8934" in page or name == "metrics.jsonl"


def test_bytes_that_are_no_text_cost_their_line_only(tmp_path: pathlib.Path) -> None:
    """After a crash of the machine; and of a path that is not in UTF-8, as Python reads it."""
    path = made.run(tmp_path / "run")
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2420, "train/l\0\xff')
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "data_dir": "da\udcfften"}))
    page = page_of(path)
    assert "0.8934" in part(page, "state") and "Not in this page" not in page
    assert b"da?ten" in page.encode()


def test_it_tells_who_has_died(tmp_path: pathlib.Path) -> None:
    path = made.run(tmp_path / "run")
    stored = status.new_status(None)
    running = {**vars(stored), "phase": "training", "time": "2026-11-29T03:00:00+00:00"}
    (path / "status.json").write_text(json.dumps(running))
    assert "running" in part(page_of(path), "state") and "last heard of" in part(page_of(path), "state")
    (path / "status.json").write_text(json.dumps({**running, "process_start": "1"}))
    assert "killed" in part(page_of(path), "state")
    (path / "status.json").write_text(
        json.dumps({**running, "state": "failed", "exit_code": 78, "reason": "no such layer"})
    )
    assert "Failed (78): no such layer" in part(page_of(path), "state")


def test_evaluations_of_another_process_are_on_the_curves(tmp_path: pathlib.Path) -> None:
    path = made.run(tmp_path / "run")
    (path / "evaluator").mkdir()
    (path / "evaluator" / "metrics.jsonl").write_text(
        '{"step": 2400, "arrays": "a", "eval/accuracy": 0.99, "eval/f1": 0.5}\n'
    )
    page = page_of(path)
    assert "best accuracy  0.99" in part(page, "state")
    assert "f1" in part(page, "learning")


def test_what_was_found_beforehand(tmp_path: pathlib.Path) -> None:
    slices = {
        "num_replicas": 8,
        "per_replica_batch_size": 128,
        "hbm_bytes": 2**34,
        "estimate": None,
        "used_bytes": None,
    }
    found = {"slices": [{"slice": "v5e-8", "verdict": "cannot be compiled", "problem": "<b>no</b>", **slices}]}
    (tmp_path / "preflight.json").write_text(json.dumps(found))
    finding = {"cause": "the loss divides by the wrong batch", "where": ["dense"], "remedy": "", "inherent": False}
    (tmp_path / "parity.json").write_text(json.dumps({"verdict": "wrong", "findings": [finding], "compared": []}))
    (tmp_path / "sweep_lr.json").write_text("{}")
    (tmp_path / "sweep_lr.svg").write_text(f"<svg>{made.EVIL}</svg>")
    page = page_of(tmp_path)
    assert keys(page) == ["state", "preflight", "parity", "pictures"]
    assert "not begun" in part(page, "state")
    assert "cannot be compiled" in part(page, "preflight") and "<b>no" not in page
    assert "the loss divides by the wrong batch. dense" in part(page, "parity")
    assert "data:image/svg+xml;base64," in page and made.EVIL not in page


def test_a_long_run_is_a_small_file(tmp_path: pathlib.Path) -> None:
    path = made.run(tmp_path / "run")
    noisy = ("accuracy", "gradient_norm", "examples_per_sec", "step_ms", "input_wait_ms", "host_memory_mib")
    fields = [f'"train/{name}": 1.%03d' for name in noisy]
    line = '{"step": %d, "train/loss": %.9f, ' + ", ".join(fields) + "}\n"
    noise = [(step * 7919) % 1000 for step in range(100_000)]
    (path / "metrics.jsonl").write_text(
        "".join(line % (step, 1 / (step + 1), *6 * (n,)) for step, n in enumerate(noise))
    )
    (path / "examples.json").unlink()
    page = page_of(path)
    assert len(page) < 500_000
    assert re.search(r"loss by step: train 1.00e-05 at step 99,999, between 1.00e-05 and 1\b", page)


def test_a_matrix_of_many_classes_shows_those_with_most_confusions(tmp_path: pathlib.Path) -> None:
    path = made.run(tmp_path / "run")
    examples = made.examples(num_classes=100)
    examples["confusion"] = [[9 if row == column else 0 for column in range(100)] for row in range(100)]
    examples["confusion"][71][93] = 5
    (path / "examples.json").write_text(json.dumps(examples))
    told = " ".join(part(page_of(path), "predictions").split())
    assert "Of the 100 classes these are the 20 with most confusions" in told
    assert "class 71 9" not in told and "class 71 14 64.3% 100.0%" in told and "class 93 9 100.0% 64.3%" in told
    (path / "examples.json").write_text(json.dumps({**examples, "confusion": None}))
    assert "There is no confusion matrix" in part(page_of(path), "predictions")


def test_runs_side_by_side(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = made.run(tmp_path / "other" / "cifar", seed=1.0, learning_rate=4e-3)
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.json").write_text((run / "config.json").read_text())
    page = several.page([look(str(path)) for path in (run, other, begun)], title="Runs")
    assert keys(page) == ["results", "learning", "speed", "time", "options"]
    assert re.search(r"best accuracy +0.8934 +0.8934 +-", part(page, "results"))
    assert re.search(r"learning_rate +0.002 +0.004 +0.002", part(page, "options"))
    assert re.search(r"goodput +75.4% +75.4%", part(page, "time"))
    legends = re.findall(r"</svg>([^<]+) <b data-curve", page)
    assert len(set(legends)) == 2 and all("cifar" in name for name in legends), "told apart by more than their name"
