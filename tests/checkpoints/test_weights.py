"""Weights begin a new run where every one of them fits or is asked to stay fresh."""

import re

import numpy as np
import pytest

from trainer.checkpoints.weights import choose_weights
from trainer.errors import ConfigError

SAVED = {
    "model/body/kernel": np.ones((3, 4), np.float32),
    "model/head/kernel": np.ones((4, 10), np.float32),
    "model/head/bias": np.ones(10, np.float32),
    "optimizer/iterations": np.array(5),
}
SAME = {name: (array.shape, str(array.dtype)) for name, array in SAVED.items()}
OTHER_HEAD = SAME | {"model/head/kernel": ((4, 7), "float32"), "model/head/bias": ((7,), "float32")}


def test_all_that_is_the_models_is_loaded() -> None:
    arrays, fresh = choose_weights(SAVED, SAME)
    assert arrays.keys() == {"model/body/kernel", "model/head/kernel", "model/head/bias"}
    assert fresh == []


@pytest.mark.parametrize("pattern", ["head/*", "model/head/*", "*head*"])
def test_a_head_of_another_shape_stays_fresh(pattern: str) -> None:
    arrays, fresh = choose_weights(SAVED, OTHER_HEAD, [pattern])
    assert arrays.keys() == {"model/body/kernel"}
    assert fresh == ["model/head/bias", "model/head/kernel"]


def test_every_mismatch_is_listed_and_the_cure_works() -> None:
    wanted = OTHER_HEAD | {"model/new[0]/scale,x": ((), "float32"), "model/body/kernel": ((3, 4), "bfloat16")}
    del wanted["model/head/bias"]
    with pytest.raises(ConfigError) as error:
        choose_weights(SAVED, wanted)
    text = str(error.value)
    assert "head/kernel: saved as float32 (4, 10), wanted as float32 (4, 7)" in text
    assert "body/kernel: saved as float32 (3, 4), wanted as bfloat16 (3, 4)" in text
    assert "head/bias: saved, but the model does not have it" in text
    assert "new[0]/scale,x: missing in the checkpoint" in text
    cure = re.search(r"--init_fresh='(.*)'", text)
    assert cure is not None
    arrays, fresh = choose_weights(SAVED, wanted, cure[1].split(","))
    assert arrays == {}
    assert fresh == ["model/body/kernel", "model/head/kernel", "model/new[0]/scale,x"]


def test_the_cure_keeps_the_patterns_that_were_given() -> None:
    with pytest.raises(ConfigError, match="--init_fresh='head/b.*,head/kernel'"):
        choose_weights(SAVED, OTHER_HEAD, ["head/b*"])


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--init_fresh matches no name. Received: haed/\*. There are: head/bias"):
        choose_weights(SAVED, OTHER_HEAD, ["haed/*", "head/*"])


def test_only_the_models_names_count() -> None:
    with pytest.raises(ConfigError, match=r"optimizer/\*"):
        choose_weights(SAVED, SAME, ["optimizer/*"])
