"""Trains on tables and on several labels with 1 and 2 replicas, in one process, and stores what came out.

`python -m tests.tables_worker FOLDER` makes the datasets and `FOLDER/found.npz`; keys are `<case>/<replicas>/<what>`.
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf

from data import build
from trainer import cluster, config, inputs, models, run_dir
from trainer.assembly import Assembly
from trainer.callbacks.clock import Clock

STEPS, MIDDLE = 12, 5
# Neither the training nor the test split is a multiple of the batch.
OPTIONS = {"model": "mlp", "model_options": {"units": [16]}, "global_batch_size": 32, "learning_rate": 0.01, "seed": 3}
CASES = {"regression": "diabetes", "multi_label": "digits_attributes"}
RESUMED = "regression"


def assemble(folder: pathlib.Path, dataset: str, devices: cluster.Cluster) -> Assembly:
    """A run on some devices, nothing put into its weights yet."""
    settings = config.merge(
        OPTIONS
        | {
            "dataset": dataset,
            "data_dir": str(folder / "data"),
            "train_steps": STEPS,
            "model_dir": str(folder / dataset),
        }
    )
    source = models.find(settings.model, settings.model_options)
    read = inputs.open_inputs(settings, str(folder / "cache"))
    return Assembly(settings, Clock(0.0), source, read, run_dir.RunDir(settings.model_dir), devices)


def train(run: Assembly, begin: int, end: int) -> dict[str, float]:
    """Metrics of the steps begin..end-1."""
    return run.replicated.run_train_loop(iter(run.train_batches(begin, run.config.seed)), end - begin).logs


def found_by(run: Assembly) -> dict[str, np.ndarray]:
    """What training from the beginning leads to, and the state in the middle."""
    run.adapt()
    adapted = {f"adapted/{name}": array.copy() for name, array in run.replicated.state().items()}
    train(run, 0, MIDDLE)
    middle = {f"middle/{name}": array.copy() for name, array in run.replicated.state().items()}
    logs = train(run, MIDDLE, STEPS)
    logs |= {f"eval_{name}": value for name, value in (run.evaluate() or {}).items()}
    ended = {f"ended/{name}": array.copy() for name, array in run.replicated.state().items()}
    copies = {}
    for variable in run.replicated.model.non_trainable_variables:
        copies[f"copies/{variable.path}"] = np.stack(run.replicated.engine.copies(variable))
    return adapted | middle | ended | copies | {f"log/{name}": np.array(value) for name, value in logs.items()}


def exported(run: Assembly) -> dict[str, np.ndarray]:
    """What the export says of the test split, and the labels."""
    served = tf.saved_model.load(run.export()).signatures["serving_default"]
    outputs: dict[str, list] = {}
    context = tf.distribute.InputContext()
    for x, y, mask in run.inputs.eval_batches(run.plan, context).take(run.plan.eval_steps):
        given = served(**(x if isinstance(x, dict) else {"image": x}))
        real = mask.numpy() > 0
        for name, tensor in {**given, "label": y}.items():
            outputs.setdefault(f"export/{name}", []).append(tensor.numpy()[real])
    return {name: np.concatenate(parts) for name, parts in outputs.items()}


def main() -> None:
    """Runs both cases, each on 1 and on 2 replicas, and goes on with one from its middle."""
    folder = pathlib.Path(sys.argv[1])
    tf.get_logger().setLevel("ERROR")  # it warns of retracing, and each run is a function of its own
    clusters = cluster.rehearse(2)
    found: dict[str, np.ndarray] = {}
    for case, dataset in CASES.items():
        build.build(dataset, str(folder / "data"))
        for devices in clusters:
            run = assemble(folder, dataset, devices)
            of_run = found_by(run)
            if devices.num_replicas == 1:
                of_run |= exported(run)
                if case == RESUMED:
                    of_run |= resumed(assemble(folder, dataset, devices), of_run)
            found |= {f"{case}/{devices.num_replicas}/{name}": array for name, array in of_run.items()}
    np.savez(folder / "found.npz", **found)


def resumed(run: Assembly, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What comes of the state in the middle, put into a new run that has not read any data."""
    saved = {name.removeprefix("middle/"): array for name, array in found.items() if name.startswith("middle/")}
    run.replicated.restore(saved, "the middle")
    train(run, MIDDLE, STEPS)
    return {f"resumed/{name}": array.copy() for name, array in run.replicated.state().items()}


if __name__ == "__main__":
    main()
