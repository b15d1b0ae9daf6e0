"""Models of keras.applications with trained weights: the image reaches them as Keras' own preprocessing gives it."""

import pathlib

import keras
import numpy as np
import pytest

from data.spec import Array, Spec
from trainer import models
from trainer.errors import ConfigError
from trainer.models import applications

# One of each way to prepare an image that is cheap to build: -1..1, BGR less a mean, and in the model itself.
CHEAP = ["MobileNet", "VGG16", "MobileNetV3Small"]
# One of each other module.
OTHERS = ["ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "InceptionResNetV2", "InceptionV3"]
OTHERS += ["MobileNetV2", "NASNetMobile", "ResNet50", "ResNet50V2", "VGG19", "Xception"]


def _spec(size: int, channels: int = 3, dtype: str = "uint8") -> Spec:
    return Spec(Array((size, size, channels), dtype), Array((), "int32"), 7)


def _modules(names: list[str]) -> set:
    return {applications._module(getattr(keras.applications, n)) for n in names if not n.startswith("MobileNetV3")}


def _saved(name: str, size: int, path: pathlib.Path) -> tuple[keras.Model, str]:
    """Keras' model with weights that make its output depend on every input, and their file."""
    theirs = getattr(keras.applications, name)(
        weights=None, include_top=False, pooling="avg", input_shape=(size, size, 3)
    )
    rng = np.random.default_rng(0)
    for variable in theirs.weights:
        if variable.path.endswith(("bias", "beta", "moving_mean")):
            variable.assign(rng.normal(size=variable.shape) * 0.1)
    file = str(path / f"{name}.weights.h5")
    theirs.save_weights(file)
    return theirs, file


def _agrees(name: str, path: pathlib.Path, size: int = 32) -> None:
    keras.utils.clear_session()
    theirs, file = _saved(name, size, path)
    images = np.random.default_rng(1).integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    module = __import__(getattr(keras.applications, name).__module__, fromlist=["preprocess_input"])
    features = theirs(module.preprocess_input(images.astype("float32"))).numpy()
    ours = models.find(f"applications/{name}", {"weights": file}).build(_spec(size))
    kernel, bias = ours.get_layer("logits").get_weights()
    expected = features @ kernel + bias
    scale = np.abs(expected).max()
    np.testing.assert_allclose(ours(images).numpy(), expected, atol=1e-4 * scale, err_msg=name)
    floats = models.find(f"applications/{name}", {"weights": file}).build(_spec(size, dtype="float32"))
    floats.get_layer("logits").set_weights([kernel, bias])
    np.testing.assert_allclose(floats((images / 255).astype("float32")).numpy(), expected, atol=1e-3 * scale)


@pytest.mark.parametrize("name", CHEAP)
def test_trained_weights_get_the_image_as_keras_prepares_it(name: str, tmp_path: pathlib.Path) -> None:
    _agrees(name, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", OTHERS)
def test_so_does_every_other_family(name: str, tmp_path: pathlib.Path) -> None:
    _agrees(name, tmp_path, 96)


def test_every_family_is_looked_at() -> None:
    assert _modules([*CHEAP, *OTHERS]) == _modules(applications.names())


def test_weights_that_cannot_be_had_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="weights must be imagenet or a file that is there. Received: 'imagenett'"):
        models.find("applications/MobileNet", {"weights": "imagenett"})
    _, file = _saved("MobileNet", 32, tmp_path)
    with pytest.raises(ConfigError, match=r"take images of 3 channels. Received: \(32, 32, 1\)"):
        models.find("applications/MobileNet", {"weights": file}).build(_spec(32, channels=1))
    with pytest.raises(ConfigError, match="the model applications/MobileNetV2 cannot be built"):
        models.find("applications/MobileNetV2", {"weights": file}).build(_spec(32))
