"""Trains with every augmentation at once, on 1 and 2 replicas in one process, and stores what came out.

`python -m tests.augmented_worker OUT.npz`. Keys are `<run>/<what>`: `one` and `two` by their replicas, `xla` is `one`
compiled, `resumed` is `one` from a state in its middle; `seen` holds what other modes see of the same run.
"""

import sys
import tempfile

import numpy as np
import tensorflow as tf

from trainer import cluster, config, inputs, models, postmortem, run_dir
from trainer.assembly import Assembly
from trainer.callbacks.clock import Clock
from trainer.lowered import Obstacle
from trainer.modes.parity_run import ParityRun
from trainer.modes.preflight import Steps

BATCH, CLASSES = 16, 10
STEPS, MIDDLE = 6, 4
OPTIONS = {
    "mode": "train",
    "dataset": "synthetic",
    "image_size": 8,
    "num_classes": CLASSES,
    "model": "cnn",
    # Statistics of batch norm and masks of dropout depend on the number of replicas by nature.
    "model_options": {"filters": [4], "units": 8, "batch_norm": False, "dropout": 0.0},
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "global_batch_size": BATCH,
    "train_steps": STEPS,
    "crop_area": 0.3,
    "rand_augment": 1,
    "flip": "both",
    "random_erasing": 0.5,
    "mixup": 0.4,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "model_dir": tempfile.gettempdir(),
}


def assemble(settings: config.Config, devices: cluster.Cluster) -> Assembly:
    source = models.find(settings.model, settings.model_options)
    folder = run_dir.RunDir(settings.model_dir)
    return Assembly(settings, Clock(0.0), source, inputs.open_inputs(settings, ""), folder, devices)


def train(run: Assembly, begin: int, end: int) -> dict[str, np.ndarray]:
    """State and metrics after the steps begin..end-1."""
    trained = run.replicated.run_train_loop(iter(run.train_batches(begin, run.config.seed)), end - begin)
    logs = {f"log/{name}": np.array(value) for name, value in trained.logs.items()}
    return {f"state/{name}": array.copy() for name, array in run.replicated.state().items()} | logs


def loss_of_postmortem(run: Assembly) -> float | None:
    """What a post-mortem finds for step 0: it does the step again, outside of the strategy."""
    alone = run.inputs.train_batches(run.plan, tf.distribute.InputContext(), 0)
    shares = [run.prepared(share) for share in alone.take(run.plan.num_replicas).as_numpy_iterator()]
    copy = run.copy(run.compiled_model())
    return postmortem.examine(copy, shares, [], {}, step=0, learning_rate=0.1).loss


def labels_of_parity(run: Assembly) -> np.ndarray:
    """[B, C]: of the shares that parity sends through the layers."""
    return np.concatenate([y for _, y in ParityRun(run, 1, quiet=False).shares(2, most_rows=None)])


def main() -> None:
    """Trains, and looks at the runs as other modes do."""
    one, two = cluster.rehearse(2)
    settings = config.merge(OPTIONS)
    found: dict[str, dict] = {}
    run = assemble(settings, two)
    postmortem_loss = loss_of_postmortem(run)
    found["two"] = train(run, 0, STEPS)
    run = assemble(settings, one)
    start = run.replicated.state()
    first_loss = train(run, 0, 1)["log/loss"]
    run.replicated.restore(start, "the start")
    found["one"] = train(run, 0, STEPS)
    run.replicated.restore(start, "the start")
    train(run, 0, MIDDLE)
    run.replicated.restore(run.replicated.state(), "the middle")
    found["resumed"] = train(run, MIDDLE, STEPS)
    found["xla"] = train(assemble(config.merge(OPTIONS | {"xla": "on"}), one), 0, STEPS)
    steps = Steps(config.merge(OPTIONS | {"mode": "preflight"}), assemble, 8)
    lowered = [steps.train(2), steps.evaluation(), steps.export()]
    found["seen"] = {
        "loss": first_loss,
        "postmortem_loss": np.array(postmortem_loss),
        "parity_labels": labels_of_parity(run),
        "obstacles": np.array([str(each) for each in lowered if isinstance(each, Obstacle)], "U300"),
    }
    np.savez(sys.argv[1], **{f"{name}/{what}": a for name, arrays in found.items() for what, a in arrays.items()})


if __name__ == "__main__":
    main()
