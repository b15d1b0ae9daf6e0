"""On JAX: loads models that TensorFlow has exported, and exports the same ones.

`python -m tests.backends.export_worker FOLDER`, with KERAS_BACKEND=jax. For each case it reads `CASE.npz` in it, with
`x/*`, the inputs, and `weight/*`, and `tensorflow/CASE/model.keras`; it writes `jax/CASE`, the export, and
`jax/CASE.npz`: `own`, what the model computes, and `loaded`, what the one of TensorFlow computes here.
"""

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

BATCH, CLASSES, LENGTH, VOCABULARY = 5, 4, 9, 30
# Of Keras' own layers: whoever has Keras can load them.
PLAIN = ("cnn", "mlp")
NAMES = (*PLAIN, "vit", "text_classifier", "transformer")


def made(name: str) -> tuple[keras.Model, Any]:
    """The model of a case, and the spec of its data."""
    from data.spec import Array, Spec
    from trainer import internals, models

    image, label = Array((8, 8, 3), "uint8"), Array((), "int32")
    tokens = Array((LENGTH,), "int32", below=VOCABULARY)
    segments = Array((LENGTH,), "int32", below=3)
    columns = {"year": Array((), "int32"), "kind": Array((), "int32", below=3), "far": Array((3,), "float32")}
    options, spec = {
        "cnn": ({"filters": [4], "units": 8}, Spec(image, label, CLASSES, "classification")),
        "mlp": ({"units": [8]}, Spec(columns, Array((2,), "float32"), None, "regression")),
        "vit": (
            {"width": 8, "depth": 1, "heads": 2, "hidden": 8, "patch": 4, "pooling": "token"},
            Spec(image, label, CLASSES, "classification"),
        ),
        "text_classifier": ({"width": 8, "depth": 1}, Spec(tokens, label, CLASSES, "classification")),
        "transformer": (
            {"width": 8, "depth": 1, "heads": 2},
            Spec({"tokens": tokens, "segments": segments}, tokens, None, "language_model"),
        ),
    }[name]
    keras.utils.clear_session()
    model = models.find(name, options).build(spec)
    internals.use_statistics(model)
    return model, spec


def inputs_of(arrays: Mapping[str, np.ndarray]) -> Any:
    """What the model of a case is given: an array, or arrays by name."""
    given = {name.removeprefix("x/"): array for name, array in arrays.items() if name.startswith("x/")}
    return given[""] if "" in given else given


def computed(model: keras.Model, x: Any) -> np.ndarray:
    """What a model gives, as outside of training."""
    return keras.ops.convert_to_numpy(model(x, training=False))


def main() -> None:
    """Loads what needs nothing but Keras before anything of ours is imported."""
    folder = pathlib.Path(sys.argv[1])
    given = {name: dict(np.load(folder / f"{name}.npz")) for name in NAMES}
    found: dict[str, dict[str, np.ndarray]] = {}

    def load(name: str) -> None:
        model = keras.models.load_model(folder / "tensorflow" / name / "model.keras")
        found[name] = {"loaded": computed(model, inputs_of(given[name]))}

    for name in PLAIN:
        load(name)
    assert not [module for module in sys.modules if module.startswith("trainer")]
    from keras.src.backend.jax import nn

    from trainer import export

    asked: list[str] = []
    nn._can_use_flash_attention = lambda *args, **kwargs: asked.append(name)  # and None, which is no
    for name in NAMES:
        model, spec = made(name)
        if name not in PLAIN:
            load(name)
        model.set_weights([given[name][f"weight/{index}"] for index in range(len(model.weights))])
        found[name]["own"] = computed(model, inputs_of(given[name]))
        before = len(asked)
        export.save(model, spec, str(folder / "jax" / name))
        assert len(asked) == before, "an export goes by the kernels that this device has"
        np.savez(folder / "jax" / f"{name}.npz", **found[name])
    assert {"transformer", "text_classifier"} <= {*asked}, "Keras asks elsewhere"
    (folder / "jax" / "refused.json").write_text(json.dumps(refused(folder)))


class Stubborn(keras.Model):
    """Goes by the size of the batch."""

    def call(self, x: Any) -> Any:
        return x if x.shape[0] > 2 else -x


def refused(folder: pathlib.Path) -> str:
    """What is said of a model that cannot be exported for every batch size."""
    from data.spec import Array, Spec
    from trainer import export
    from trainer.errors import ConfigError

    model = Stubborn(name="stubborn")
    model(np.zeros((BATCH, 4), "float32"))
    try:
        export.save(model, Spec(Array((4,), "float32"), Array((4,), "float32"), None, ""), str(folder / "jax" / "no"))
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
