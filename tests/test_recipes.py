"""Every file of recipes/ is a recipe: its header is whole, each of its options does something, it trains, and what runs
here reaches what it says. A new file needs no change here."""

import dataclasses
import functools
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import GUARD_SECS, ROOT, Trainer, metrics_of
from trainer import backend, config, flags
from trainer.options import FIELDS

FOLDER = ROOT / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
KEYS = ("Data", "Result", "Cost", "Source")
# What a recipe cannot know: where things are, and on what they run.
ELSEWHERE = ("mode", "model_dir", "data_dir", "export_dir", "tensorboard_dir", "cache", "cache_dir", "seed")
# One step of a recipe that is not run here; its own line `# Try:` says more where it has to.
TRY = "--dataset=synthetic --global_batch_size=8"
NOT_RUN = "not run here"
SEEDS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Band:
    """Of an evaluation metric, after the last step."""

    metric: str
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A file of recipes/.

    says: key of the header -> text. options: what the file sets.
    """

    name: str
    title: str
    says: dict[str, str]
    options: dict[str, Any]

    @property
    def path(self) -> str:
        return str(FOLDER / f"{self.name}.toml")

    @property
    def band(self) -> Band | None:
        """What it reaches; None if it is not run here."""
        found = re.match(r"(\w+) ([\d.]+) to ([\d.]+)\b", self.says["Result"])
        return Band(found[1], float(found[2]), float(found[3])) if found else None


def read(name: str) -> Recipe:
    """The recipe `name`."""
    path = FOLDER / f"{name}.toml"
    lines = path.read_text(encoding="utf-8").splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    keyed = [match.groups() for line in header if (match := re.fullmatch(r"# ([A-Z]\w+): +(\S.*)", line))]
    title = [line.removeprefix("#").strip() for line in header[: header.index("#")]]
    return Recipe(name, " ".join(title), dict(keyed), config.load(str(path)))


def settings(recipe: Recipe, *words: str) -> config.Config:
    """The config that a command line with the recipe makes."""
    command = flags.parse(["main", f"--config={recipe.path}", "--model_dir=/nowhere", *words])
    return flags.merge(flags.layers(command, {}))


@pytest.fixture(scope="module")
def data_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds what a recipe's `# Data:` line builds, once; returns the data_dir."""
    folder = tmp_path_factory.mktemp("datasets")

    @functools.cache
    def build(line: str) -> pathlib.Path:
        python, *rest = shlex.split(line)
        assert python == "python"
        command = [sys.executable, *rest, f"--data_dir={folder}"]
        done = subprocess.run(command, cwd=ROOT, timeout=GUARD_SECS, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return folder

    return lambda recipe: build(recipe.says["Data"])


def test_there_are_recipes() -> None:
    assert {"digits", "imagenet_resnet50_lars", "imagenet_resnet50_sgd", "imagenet_vit_s16"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_header(name: str) -> None:
    recipe = read(name)
    assert recipe.title.endswith("."), "the first line says what it trains"
    assert [key for key in KEYS if key not in recipe.says] == []
    assert recipe.says["Data"].startswith("python -m data.build ")
    assert (recipe.band is None) == (NOT_RUN in recipe.says["Result"]), "a band, or that it is not run here"
    if recipe.band:
        assert recipe.band.low < recipe.band.high
    else:
        assert "http" in recipe.says["Source"] or "arXiv:" in recipe.says["Source"]


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_known_and_says_something(name: str) -> None:
    recipe = read(name)
    merged = settings(recipe)  # refuses unknown names, values, and options without effect beside the others
    groups = {key: FIELDS[key].metadata["group"] for key in recipe.options}
    assert [key for key in recipe.options if key in ELSEWHERE or groups[key] == "hardware"] == []
    assert [key for key in recipe.options if getattr(merged, key) == default(key)] == []


def default(name: str) -> Any:
    """Of an option."""
    return getattr(config.Config(), name)


class Reads:
    """Notes which fields of a frozen dataclass are read, by whoever uses them.

    Checks, comparisons and copies read every field, and use none.
    """

    IDLE = ("dataclasses", "trainer.config", "trainer.rules", "trainer.flags", __name__)

    def __init__(self) -> None:
        self.names: set[str] = set()

    def watching(self, cls: type) -> type:
        """A subclass of `cls` whose objects tell."""
        fields = {field.name for field in dataclasses.fields(cls)}

        def get(this: Any, name: str) -> Any:
            if name in fields and sys._getframe(1).f_globals["__name__"] not in self.IDLE:
                self.names.add(name)
            return cls.__getattribute__(this, name)

        return dataclasses.dataclass(frozen=True)(type(cls.__name__, (cls,), {"__getattribute__": get}))


@pytest.fixture
def as_found() -> Iterator[None]:
    """Puts back what a run sets in Keras and TensorFlow. Functions run op by op: tracing takes ten times as long."""
    import keras
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)
    keras.config.set_dtype_policy("float32")


# Looked at before the model is built or after the step: which model, from where it begins, what evaluates and keeps it.
ELSEWHERE_USED = {"model", "model_options", "init_from", "init_fresh", "eval_split", "best_goal"}


@pytest.mark.slow
@pytest.mark.usefixtures("as_found")
@pytest.mark.filterwarnings("ignore:Even though the .*run_functions_eagerly")  # tf.data is left as it is
@pytest.mark.parametrize("name", NAMES)
def test_one_step_uses_every_option(
    name: str, data_of: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from trainer import cluster, hardware, inputs, models, run_dir
    from trainer.assembly import Assembly
    from trainer.callbacks.clock import Clock

    recipe = read(name)
    words = [f"--data_dir={data_of(recipe)}"] if recipe.band else shlex.split(recipe.says.get("Try", TRY))
    given = settings(recipe, *words)
    wanted = recipe.options.get("model_options", {})
    reads, reads_of_model = Reads(), Reads()
    if wanted:
        module = sys.modules[type(models.find(given.model, wanted).options).__module__]
        defaults = {field.name: field.default for field in dataclasses.fields(module.Options)}
        assert [key for key, value in wanted.items() if value == defaults.get(key)] == [], "as by default"
        monkeypatch.setattr(module, "Options", reads_of_model.watching(module.Options))
    source = models.find(given.model, given.model_options)
    reads_of_model.names.clear()  # its own checks
    watched = reads.watching(config.Config)(**{key: getattr(given, key) for key in FIELDS})
    read_inputs = inputs.open_inputs(watched, cache_dir=str(tmp_path))
    target = hardware.resolve(tpu=None, replicas=None, environ={})
    devices = cluster.connect(target, connect_timeout_secs=GUARD_SECS)
    run = Assembly(watched, Clock(time.monotonic()), source, read_inputs, run_dir.RunDir(str(tmp_path)), devices)
    done = run.replicated.run_train_loop(iter(run.train_batches(0, watched.seed)), 1)
    assert done.halted_at is None
    assert np.isfinite(done.logs["loss"])
    assert int(run.replicated.model.optimizer.iterations.numpy()) == 1
    assert set(recipe.options) - reads.names - ELSEWHERE_USED == set(), "set, and nobody looks at it"
    assert set(wanted) - reads_of_model.names == set(), "set, and the model does not look at it"


def reached(recipe: Recipe, data_dir: pathlib.Path, seed: int, on: str = backend.NAMES[0]) -> float:
    """What a whole run of the recipe reaches."""
    assert recipe.band is not None
    with tempfile.TemporaryDirectory() as model_dir:
        trainer = Trainer(data_dir)
        trainer.run(
            f"--config={recipe.path}",
            f"--backend={on}",
            f"--dataset={recipe.options['dataset']}",
            f"--model_dir={model_dir}",
            f"--seed={seed}",
        )
        found = [r for r in metrics_of(pathlib.Path(model_dir)) if f"eval/{recipe.band.metric}" in r]
    return found[-1][f"eval/{recipe.band.metric}"]


RUN_HERE = [name for name in NAMES if read(name).band]
# One a task is run each time. These are of a task that another recipe has too, or take half a minute.
NIGHTLY = {"digits_vit", "text_language_model"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in RUN_HERE]
)
def test_reaches_its_result(name: str, data_of: Any) -> None:
    recipe = read(name)
    assert recipe.band.low <= reached(recipe, data_of(recipe), SEEDS[0]) <= recipe.band.high


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RUN_HERE)
@pytest.mark.parametrize("on", backend.NAMES)
def test_reaches_its_result_with_every_seed(name: str, seed: int, on: str, data_of: Any) -> None:
    recipe = read(name)
    assert recipe.band.low <= reached(recipe, data_of(recipe), seed, on) <= recipe.band.high
