"""What is computed of batches, models and gradients is the same on both backends; other tests hold it to NumPy."""

import subprocess
import sys

import numpy as np
import pytest

from tests.backends import neutral_worker
from tests.conftest import GUARD_SECS, ROOT, clean_environ

# Most of what JAX does here is to compile what runs once.
_QUICK = "--xla_backend_optimization_level=0"

Found = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def of_jax(tmp_path_factory: pytest.TempPathFactory) -> Found:
    path = tmp_path_factory.mktemp("neutral") / "found.npz"
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.backends.neutral_worker", str(path)]
    environ = clean_environ() | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": _QUICK}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=GUARD_SECS, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(path))


@pytest.fixture(scope="module")
def of_tensorflow() -> Found:
    return neutral_worker.found()


def below(found: Found, part: str) -> Found:
    return {name: array for name, array in found.items() if name.startswith(f"{part}/")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "tolerance"),
    [
        ("augmented", 2e-7),
        ("learned", 5e-7),
        ("schedules", 5e-7),
        ("optimized", 2e-6),
        ("adapted", 1e-6),
        ("examined", 1e-6),
        ("remarked", 0),
        ("profiled", 0),
    ],
)
def test_both_backends_compute_the_same(of_jax: Found, of_tensorflow: Found, part: str, tolerance: float) -> None:
    """To the tolerance, relative to the largest number of an array."""
    ours, theirs = below(of_jax, part), below(of_tensorflow, part)
    assert ours and ours.keys() == theirs.keys()
    for name, array in theirs.items():
        if array.dtype.kind == "U":
            assert ours[name] == array, name
            continue
        scale = np.max(np.abs(array), initial=0, where=np.isfinite(array))
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.slow
def test_what_is_found_is_what_was_hidden(of_jax: Found) -> None:
    """So that two backends which find nothing do not agree."""
    assert of_jax["examined/log/-1.0/first"] == "the output of layer log (Function)"
    assert of_jax["examined/sqrt/0.0/first"] == "the gradient of the output of layer in (Dense)"
    for name in ("log/-1.0", "sqrt/0.0"):
        assert str(of_jax[f"examined/{name}/suspects"]) == "[Record(shard='shard', index=1)]"
    assert "depends on weights" in str(of_jax["adapted/refused"])
    assert "Received: early/kernel, early/bias. Put it before" in str(of_jax["adapted/refused"])
    assert str(of_jax["remarked/mixes/True"]).startswith("centred: the answer for an example depends on the others")
    assert of_jax["remarked/mixes/False"] == "None"
    assert of_jax["profiled/steps"].tolist() == [10, 20]
    for remark in (
        "grouped: a convolution in groups",
        "head: the loss is computed from bfloat16",
        "batch: 12 examples",
    ):
        assert remark in str(of_jax["remarked/lint"])


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("mixed_bfloat16", 2e-3)])
def test_layers_that_are_computed_again_train_the_same_on_jax(of_jax: Found, precision: str, tolerance: float) -> None:
    plain, again = (below(of_jax, f"remat/{precision}/{kind}") for kind in ("plain", "again"))
    products = [
        int(found.pop(f"remat/{precision}/{kind}/products")) for kind, found in (("plain", plain), ("again", again))
    ]
    assert products[1] > products[0], "nothing was computed again"
    for name, array in plain.items():
        found = again[name.replace("/plain/", "/again/")]
        if array.dtype.kind == "f":
            np.testing.assert_allclose(found, array, rtol=0, atol=tolerance, err_msg=name)
        else:  # the state of random numbers moves on once
            np.testing.assert_array_equal(found, array, err_msg=name)
    states = [array for name, array in again.items() if "seed_generator" in name]
    assert len(states) == 2 and all(state[1] == 2 for state in states), "two steps, one draw in each"
