"""`--mode=parity` tells faults from what differs by nature, and says which layer, loss or metric it is."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ
from trainer import comparison, config, parity
from trainer.comparison import EVALUATION, GRADIENTS, LOSS, METRICS, STATE, WEIGHTS, Observed, Snapshot

# Faults of `parity_models`, with options behind them -> part of what must be said, and of where it must be seen.
WRONG = {
    "by_replicas": ("the loss is divided by the 2 replicas", "loss"),
    "centred+dropout+batch_norm": ("depends on the other examples of the batch", "the_centred (Centred)"),
    "replica": ("depends on the replica", "the_replica (AsksForReplica)"),
    "noise": ("no seed of Keras' decides", "the_noise (Noise)"),
    "always_noisy": ("nothing behind them can be compared", "the_always_noisy (AlwaysNoisy)"),
    # Replicas meet in the middle of the pass through the layers.
    "exchanging+hardest": ("the loss is no mean over the examples of the batch", "loss"),
    "spectral:xla=auto": ("the run on 1 replica, XLA is refused", ""),
    "python:xla=auto": ("XLA cannot compile the operation PyFunc", "parity_models.py"),
    "overflow:xla=auto": ("XLA computes something else", "the_overflow (Overflow)"),
}
REFUSED = {"counter": "different values of the_counter/count", "reduction_sum": "sums over the batch"}
SEVERAL, OWN_STEP = "mean_of_peaks+peak+per_positive+unseeded", "own_step+mean_of_means"
FAILING = "exchanging_in_function:xla=auto"
BY_NATURE, LOW_PRECISION = "batch_norm+dropout:xla=auto", "none:precision=mixed_bfloat16"
UNSHARED = "none:global_batch_size=15"


@pytest.fixture(scope="module")
def found() -> Mapping[str, dict]:
    """Fault -> parity.json, and how the run ended."""
    faults = [*WRONG, *REFUSED, FAILING, SEVERAL, OWN_STEP, BY_NATURE, LOW_PRECISION, UNSHARED]
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity_worker", *faults],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=2 * GUARD_SECS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _faults(result: dict) -> list[dict]:
    return [finding for finding in result["findings"] if not finding["inherent"]]


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_is_named_with_its_place(found: Mapping[str, dict], fault: str) -> None:
    cause, where = WRONG[fault]
    [finding] = _faults(found[fault])
    assert cause in finding["cause"]
    assert where in ", ".join(finding["where"])
    assert finding["remedy"]
    assert found[fault]["verdict"] == "wrong"
    assert cause in found[fault]["error"], "the last line of the run names it"


@pytest.mark.slow
@pytest.mark.parametrize("fault", REFUSED)
def test_a_refusal_on_several_replicas_is_told_as_such(found: Mapping[str, dict], fault: str) -> None:
    assert "the run on 2 replicas is refused" in found[fault]["error"]
    assert REFUSED[fault] in found[fault]["error"]


@pytest.mark.slow
def test_a_failure_on_several_replicas_is_told_once_with_its_remedy(found: Mapping[str, dict]) -> None:
    [finding] = _faults(found[FAILING])
    assert finding["cause"] == "the run on 2 replicas fails"
    assert "Take @tf.function out of the model" in finding["remedy"] and "\x1b" not in finding["remedy"]
    assert found[FAILING]["not_compared"] == ["2 replicas, XLA: the run on 2 replicas fails already"]


@pytest.mark.slow
def test_one_fault_does_not_hide_others(found: Mapping[str, dict]) -> None:
    causes = {finding["cause"]: finding["where"] for finding in _faults(found[SEVERAL])}
    assert causes.pop("each build has other initial weights") == ["model/dense/kernel"]
    assert causes.pop("the loss is no mean over the examples of the batch")[0] == "loss"
    assert causes.pop("state is updated by what is no mean over examples") == ["state the_peak/peak"]
    [(cause, where)] = causes.items()
    assert "the metric averages averages" in cause
    assert where == ["metrics mean_of_peaks"]


@pytest.mark.slow
def test_a_train_step_of_its_own_and_a_metric_that_only_padding_shows(found: Mapping[str, dict]) -> None:
    loss, metric = _faults(found[OWN_STEP])
    assert "the loss is a sum over the batch" in loss["cause"]
    assert "gradients logits/kernel" in loss["where"]
    assert "a metric averages averages" in metric["cause"]
    assert metric["where"] == ["evaluation mean_of_means"]


@pytest.mark.slow
def test_what_differs_by_nature_is_named_and_no_fault(found: Mapping[str, dict]) -> None:
    result = found[BY_NATURE]
    assert (result["error"], result["verdict"]) == ("", "differs by nature")
    said = {finding["cause"].partition(",")[0]: finding["where"] for finding in result["findings"]}
    assert said == {
        "batch norm normalises each replica's share by that share's own statistics": ["the_batch_norm"],
        "each replica draws random numbers of its own": ["the_dropout"],
        "XLA draws other random numbers": ["the_dropout"],
    }
    apart = [d for run in result["compared"] for d in run["differences"] if not d["agrees"]]
    assert apart, "they do differ"
    assert not [d for d in apart if d["kind"] == EVALUATION], "not in evaluation, of the same weights"


@pytest.mark.slow
def test_low_precision_alone_is_rounding(found: Mapping[str, dict]) -> None:
    assert (found[LOW_PRECISION]["error"], found[LOW_PRECISION]["findings"]) == ("", [])


@pytest.mark.slow
def test_a_clean_model_agrees_in_every_case(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    flags = ["--mode=parity", "--model_options=batch_norm=false, dropout=0.0, filters=[8], units=16", "--tpu=elsewhere"]
    # Keras, once imported by another test, sets it lower for our children too, and C++ notes of MirroredStrategy come.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    done = trainer.run(*flags, f"--model_dir={tmp_path}/run", "--parity_steps=3", environ=quiet)
    assert "virtual replicas on this machine's CPU, whatever else it has, not on --tpu=elsewhere" in done.stdout
    assert done.stdout.endswith("parity holds\n")
    assert done.stderr == ""
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["parity.json"]
    result = json.loads((tmp_path / "run" / "parity.json").read_text())
    assert [run["other"] for run in result["compared"]] == ["2 replicas", "1 replica, XLA", "2 replicas, XLA"]
    for run in result["compared"]:
        assert {d["kind"] for d in run["differences"]} == {LOSS, GRADIENTS, METRICS, WEIGHTS, EVALUATION}
        assert {d["step"] for d in run["differences"]} == {1, 3}
        assert all(d["agrees"] for d in run["differences"])
    one_step = [d["value"] for run in result["compared"] for d in run["differences"] if d["kind"] == GRADIENTS]
    assert 0 < max(one_step) < 1e-5, "the same but for the last digits, of gradients that were seen"


@pytest.mark.slow
def test_a_fault_ends_the_run_with_78(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    flags = ["--mode=parity", "--model=tests.parity_models", '--model_options=fault="divided_twice"', "--xla=off"]
    done = trainer.run(*flags, f"--model_dir={tmp_path}", "--replicas=4", "--parity_steps=1", code=78)
    assert "WRONG  the loss is divided by the batch size twice: loss" in done.stdout
    assert "parity does not hold: the loss is divided by the batch size twice" in done.stderr.splitlines()[-1]
    assert "1 replica - 4 replicas, after 1" in done.stdout


@pytest.mark.slow
def test_a_batch_that_replicas_cannot_share_is_no_finding(found: Mapping[str, dict]) -> None:
    assert "global_batch_size must divide by the 2 replicas" in found[UNSHARED].pop("error")
    assert found[UNSHARED] == {}, "nothing was run"


def test_one_replica_is_nothing_to_compare() -> None:
    _, problems = config.inspect({"mode": "parity", "dataset": "d", "model_dir": "m", "replicas": 1})
    assert any("give replicas=2 or more" in problem for problem in problems)


def _observed(loss: float, gradient: Sequence[float], moved: Sequence[float], start: float = 1.0) -> Observed:
    weights = np.full(len(moved), start, np.float32)
    snapshot = Snapshot(
        {"loss": loss}, {"w": np.array(gradient, np.float32)}, {"w": weights + np.array(moved, np.float32)}, {}
    )
    return Observed({"w": weights}, snapshot, snapshot, {})


def _apart(one: Observed, nudged: Observed, other: Observed, precision: str = "float32") -> list[str]:
    differences = comparison.compare(one, nudged, other, steps=1, precision=precision)
    return [difference.kind for difference in comparison.apart(differences)]


ONE = _observed(2.0, [1.0, 0.0], [-0.1, 0.0])


def test_what_a_last_bit_moves_as_much_is_rounding() -> None:
    # Adam's way: a gradient of nothing but rounding makes a step of full size.
    moved = _observed(2.0, [1.0, 1e-9], [-0.1, -0.1])
    assert _apart(ONE, ONE, moved) == [WEIGHTS]
    assert _apart(ONE, moved, moved) == []


def test_gradients_of_nothing_are_the_same() -> None:
    one = _observed(1.0, [0.0], [0.0])
    assert _apart(one, one, one) == []


@pytest.mark.parametrize("loss", [4.0, 2.001, float("nan"), float("inf")])
def test_a_loss_that_differs_is_seen(loss: float) -> None:
    assert _apart(ONE, ONE, _observed(loss, [1.0, 0.0], [-0.1, 0.0])) == [LOSS]


def test_tolerance_is_that_of_the_precision() -> None:
    other = _observed(2.02, [1.0, 0.0], [-0.1, 0.0])
    assert _apart(ONE, ONE, other, "mixed_bfloat16") == []
    assert _apart(ONE, ONE, other, "mixed_float16") == [LOSS]


def test_weights_are_compared_by_the_way_they_went() -> None:
    # Half a step of 1e-6 is nothing next to the weight, and still half a step.
    one, other = (_observed(1.0, [1.0], [moved]) for moved in (-1e-6, -5e-7))
    assert _apart(one, one, other) == [WEIGHTS]
    # What is left of the same steps where float32 rounds the weight to 6e-5 says nothing.
    one, other = (_observed(1.0, [1.0], [moved], start=1000.0) for moved in (-1e-4, -5e-5))
    assert _apart(one, one, other) == []


def test_what_only_later_steps_show() -> None:
    first = ONE.first
    late = Snapshot(first.logs, first.gradients, {"w": first.weights["w"] + 0.1}, {})
    other = Observed(ONE.start, first, late, {})
    differences = comparison.compare(ONE, ONE, other, steps=8, precision="float32")
    nothing = parity.Pass((), 1.0)
    passes = parity.Passes(nothing, nothing, nothing, nothing, ())
    [finding] = parity.of_replicas(differences, passes, 2)
    assert finding.cause == "the first step agrees, step 8 does not"
    assert finding.where == ("weights w",)


def test_state_and_evaluation_have_findings_of_their_own() -> None:
    state = {"mean": np.array(1.0)}
    snapshot = Snapshot({}, {}, {}, state)
    one = Observed({}, snapshot, snapshot, {"auc": 0.5})
    other_snapshot = Snapshot({}, {}, {}, {"mean": np.array(2.0)})
    other = Observed({}, other_snapshot, other_snapshot, {"auc": 0.75})
    differences = comparison.compare(one, one, other, steps=1, precision="float32")
    nothing = parity.Pass((), 1.0)
    found = parity.of_replicas(differences, parity.Passes(nothing, nothing, nothing, nothing, ()), 2)
    assert [finding.where for finding in found] == [(f"{EVALUATION} auc",), (f"{STATE} mean",)]
