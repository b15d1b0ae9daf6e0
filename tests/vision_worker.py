"""Trains image models on 1 and on 2 replicas, in one process, and prints how far apart they end.

`python -m tests.vision_worker CASE ...` prints one JSON object: case -> largest difference of a weight, of batch norm's
state and of what the steps report, and how far the weights have moved.
"""

import json
import logging
import sys
import tempfile

import numpy as np

from trainer import cluster, config, inputs, models, run_dir
from trainer.assembly import Assembly
from trainer.callbacks.clock import Clock

STEPS = 8
OPTIONS = {
    "dataset": "synthetic",
    "image_size": 16,
    "num_classes": 10,
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "global_batch_size": 16,
    "train_steps": STEPS,
    "xla": "off",
}
SMALL = {"depth": 18, "width": 8, "stem": "small"}
VIT = {"width": 32, "depth": 1, "heads": 4, "hidden": 64, "patch": 4, "positions": "learned", "pooling": "token"}
RESNET = {"depth": 18, "width": 8, "stem": "small"}
CASES = {
    "vit": ("vit", VIT),
    "synchronized": ("resnet", RESNET | {"synchronized": True}),
    "resnet": ("resnet", RESNET),
}


def trained(name: str, devices: cluster.Cluster, folder: str) -> tuple[list, list, list, dict]:
    """Weights before, weights and state after, and what the steps report."""
    model, options = CASES[name]
    settings = config.merge(OPTIONS | {"model": model, "model_options": options, "model_dir": folder})
    source = models.find(model, options)
    run = Assembly(settings, Clock(0.0), source, inputs.open_inputs(settings, ""), run_dir.RunDir(folder), devices)
    kept = run.replicated.model
    before = [v.numpy() for v in kept.trainable_variables]
    logs = run.replicated.run_train_loop(iter(run.train_batches(0, settings.seed)), STEPS).logs
    state = [v.numpy() for v in kept.non_trainable_variables if "moving" in v.path]
    return before, [v.numpy() for v in kept.trainable_variables], state, logs


def apart(ones: list, others: list) -> float:
    """The largest difference."""
    return max((float(np.abs(a - b).max()) for a, b in zip(ones, others, strict=True)), default=0.0)


def main() -> None:
    """Compares the cases that are named."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    clusters = cluster.rehearse(2)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:]:
            (before, *one, logs), (begun, *two, other_logs) = (trained(name, devices, folder) for devices in clusters)
            found[name] = {
                "begin": apart(before, begun),
                "moved": apart(before, one[0]),
                "weights": apart(one[0], two[0]),
                "state": apart(one[1], two[1]),
                "logs": max(abs(logs[key] - other_logs[key]) for key in logs),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
