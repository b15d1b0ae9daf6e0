"""Parity: what a model learns does not depend on how many replicas share the batch, nor on the backend."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import replicas_worker
from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import backend

pytestmark = pytest.mark.slow

REPLICAS = (1, 2, 4)
# What four tell beside two, at twice the time: a sum of more than two numbers, and who is one of several others.
ON_FOUR = ("adamw", "subclassed")
# Sums in another order differ in the last digits; bfloat16 has three of them, float16 four.
TOLERANCE = {"bfloat16": 2e-2, "float16": 1e-3, "xla": 1e-4}
# Batch statistics are those of a replica's share, so training differs by design (the README says so).
DIFFERENT_BY_DESIGN = ("batch_norm",)
RANDOM = ("blocks", "remat", "remat_xla")  # each replica draws dropout masks of its own
SAME = [name for name in replicas_worker.CASES if name not in (*DIFFERENT_BY_DESIGN, *RANDOM)]
TENSORFLOW, JAX = backend.NAMES
RUNS = [(name, num_replicas) for name in backend.NAMES for num_replicas in REPLICAS]
FEW = [run for run in RUNS if run[1] < max(REPLICAS)]
SEVERAL = [run for run in RUNS if run[1] > 1]
XLA = [(TENSORFLOW, 1), (TENSORFLOW, 2)]  # where there is a choice


Found = dict[tuple[str, int], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Backend and number of replicas -> what `replicas_worker` stored."""
    folder = tmp_path_factory.mktemp("replicas")
    paths = {run: folder / f"{run}.npz" for run in RUNS}
    for backend_name in backend.NAMES:
        workers = {run: _start(*run, paths[run]) for run in RUNS if run[0] == backend_name}
        for run, worker in workers.items():
            output = worker.communicate(timeout=2 * GUARD_SECS)[0]
            assert worker.returncode == 0, f"{run}: {output}"
    return {run: dict(np.load(path)) for run, path in paths.items()}


def _start(backend_name: str, num_replicas: int, path: pathlib.Path) -> subprocess.Popen:
    cases = ON_FOUR if num_replicas == max(REPLICAS) else []
    command = [sys.executable, "-m", "tests.replicas_worker", str(num_replicas), str(path), *cases]
    environ = clean_environ() | {"KERAS_BACKEND": backend_name}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _case(found: dict[str, np.ndarray], name: str, *kinds: str) -> dict[str, np.ndarray]:
    return {
        key.removeprefix(f"{name}/"): a
        for key, a in found.items()
        if key.startswith(tuple(f"{name}/{k}/" for k in kinds))
    }


@pytest.mark.parametrize(("num_replicas", "name"), [(2, name) for name in SAME] + [(4, name) for name in ON_FOUR])
@pytest.mark.parametrize("on", backend.NAMES)
def test_metrics_and_weights_are_those_of_one_replica(trained: Found, name: str, num_replicas: int, on: str) -> None:
    one, many = (_case(trained[on, n], name, "log", "weight") for n in (1, num_replicas))
    assert one.keys() == many.keys()
    assert any(key.startswith("log") for key in one)
    for key, array in one.items():
        np.testing.assert_allclose(many[key], array, rtol=0, atol=TOLERANCE.get(name, 1e-5), err_msg=key)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", [name for name in replicas_worker.CASES if name not in RANDOM])
def test_jax_learns_what_tensorflow_learns(trained: Found, name: str, num_replicas: int) -> None:
    # Batch norm too: the statistics of a replica are those of its share on both.
    theirs, ours = (_case(trained[on, num_replicas], name, "log", "weight") for on in backend.NAMES)
    assert theirs.keys() == ours.keys()
    for key, array in theirs.items():
        np.testing.assert_allclose(ours[key], array, rtol=0, atol=TOLERANCE.get(name, 1e-5), err_msg=key)


@pytest.mark.parametrize("on", backend.NAMES)
@pytest.mark.parametrize("name", ["own_train_step", "own_compute_loss", "clipvalue", "adamw", "l2", "add_loss"])
def test_the_option_has_an_effect(trained: Found, name: str, on: str) -> None:
    # Parity of options that do nothing would prove nothing: each case ends elsewhere than plain training. The models
    # with a step or a loss of their own, which are the plain ones, clip by norm and by global norm.
    plain, optioned = _case(trained[on, 1], "scalar_loss", "weight"), _case(trained[on, 1], name, "weight")
    assert max(np.abs(plain[key] - optioned[key]).max() for key in plain) > 1e-2


@pytest.mark.parametrize("run", FEW)
def test_loop_length_changes_nothing(trained: Found, run: tuple[str, int]) -> None:
    long, by_one = (_case(trained[run], name, "log", "weight") for name in ("adamw", "by_one"))
    for key, array in long.items():
        np.testing.assert_allclose(by_one[key], array, rtol=0, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("run", FEW)
def test_microbatches_make_the_step_of_the_whole_batch(trained: Found, run: tuple[str, int]) -> None:
    whole, parts = (_case(trained[run], name, "log", "weight") for name in ("xla_off", "microbatches"))
    for key, array in whole.items():
        np.testing.assert_allclose(parts[key], array, rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("run", FEW)
def test_rematerialised_layers_train_the_same(trained: Found, run: tuple[str, int]) -> None:
    # With the same dropout masks in both passes, statistics that move on once, and the layers' own losses.
    plain, remat = (_case(trained[run], name, "log", "weight", "state") for name in ("blocks", "remat"))
    assert any("seed" in key or "steps" in key for key in plain)
    for key, array in plain.items():
        np.testing.assert_allclose(remat[key], array, rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("run", XLA)
def test_xla_agrees_with_plain(trained: Found, run: tuple[str, int]) -> None:
    plain, compiled = (_case(trained[run], name, "log", "weight") for name in ("xla_off", "xla"))
    for key, array in plain.items():
        np.testing.assert_allclose(compiled[key], array, rtol=0, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("on", backend.NAMES)
@pytest.mark.parametrize(
    ("num_replicas", "name"),
    [(2, "batch_norm"), (2, "remat_xla"), (2, "subclassed"), (4, "subclassed")],
)
def test_replicas_hold_the_same_state(trained: Found, name: str, num_replicas: int, on: str) -> None:
    state = _case(trained[on, num_replicas], name, "state")
    assert state
    for key, copies in state.items():
        assert len(copies) == num_replicas
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0], err_msg=key)


@pytest.mark.parametrize("run", RUNS)
def test_batch_norm_statistics_are_the_mean_over_replicas(trained: Found, run: tuple[str, int]) -> None:
    images, _ = replicas_worker.digits()
    shares = images[: replicas_worker.GLOBAL_BATCH].reshape(run[1], -1, 64)  # [R, b, 64]
    mean = 0.2 * shares.mean(axis=1).mean(axis=0)
    variance = 0.8 + 0.2 * shares.var(axis=1).mean(axis=0)
    for copy in trained[run]["oracle/mean"]:
        np.testing.assert_allclose(copy, mean, atol=1e-6)
    for copy in trained[run]["oracle/variance"]:
        np.testing.assert_allclose(copy, variance, atol=1e-6)


@pytest.mark.parametrize(("run", "kind"), [*((run, "plain") for run in SEVERAL), ((TENSORFLOW, 2), "xla")])
def test_replicas_drop_out_different_units(trained: Found, kind: str, run: tuple[str, int]) -> None:
    sums = trained[run][f"masks/{kind}"].astype(int)  # [step, MASKS]: two decimal digits a replica
    masks = [(sums // 100**replica) % 100 for replica in range(run[1])]
    assert all((mask < 2**replicas_worker.MASK_BITS).all() for mask in masks)
    for replica, mask in enumerate(masks):
        for other in masks[:replica]:
            assert (mask != other).any(axis=1).all(), "two replicas drew the same mask"
        assert (mask[0] != mask[1]).any(), "a replica drew the same mask twice"


@pytest.mark.parametrize(("run", "kind"), [*((run, "plain") for run in RUNS), *((run, "xla") for run in XLA)])
def test_restored_random_state_draws_what_would_have_been_drawn(
    trained: Found, kind: str, run: tuple[str, int]
) -> None:
    sums = trained[run][f"masks/{kind}"]  # steps 1, 2, 3 and, from the state after 1, again 2 and 3
    np.testing.assert_array_equal(sums[3:5], sums[1:3])


@pytest.mark.parametrize("kind", ["halted", "tried"])
@pytest.mark.parametrize("name", replicas_worker.NOT_FINITE)
@pytest.mark.parametrize("run", FEW)
def test_a_step_that_is_not_finite_changes_nothing(trained: Found, name: str, kind: str, run: tuple[str, int]) -> None:
    found = trained[run]
    assert int(found[f"{name}/{kind}/at"]) == replicas_worker.BAD_STEP
    assert int(found[f"{name}/quiet/at"]) == -1
    quiet, halted = (_case({k: a for k, a in found.items() if "/at" not in k}, name, each) for each in ("quiet", kind))
    quiet, halted = ({k.split("/", 1)[1]: a for k, a in each.items()} for each in (quiet, halted))
    assert quiet.keys() == halted.keys()
    for key, array in quiet.items():
        np.testing.assert_array_equal(halted[key], array, err_msg=key)


@pytest.mark.parametrize("name", replicas_worker.NOT_FINITE)
@pytest.mark.parametrize("run", FEW)
def test_training_goes_on_behind_it(trained: Found, name: str, run: tuple[str, int]) -> None:
    found = trained[run]
    assert int(found[f"{name}/behind/at"]) == -1
    assert np.isfinite(found[f"{name}/behind/loss"])
    # float16 may leave out steps of its own while it looks for a scale.
    if name != "float16":
        steps = replicas_worker.BAD_STEP + 1 + replicas_worker.STEPS_OF_CALL
        assert int(found[f"{name}/behind/iterations"]) == steps
