"""Compares models of `parity_models` on 1 and 2 replicas, in one process, and prints what was found.

`python -m tests.parity_worker FAULT[:OPTION=VALUE...] ...` prints one JSON object: fault -> parity.json of it.
"""

import json
import logging
import sys
import tempfile

from trainer import backend, cluster, config, inputs, models, run_dir
from trainer.assembly import Assembly
from trainer.callbacks.clock import Clock
from trainer.errors import ConfigError
from trainer.modes import parity

MODEL = "tests.parity_models"
OPTIONS = {
    "mode": "parity",
    "dataset": "synthetic",
    "image_size": 4,
    "num_classes": 10,
    "model": MODEL,
    "optimizer": "sgd",  # traced in less time than others
    "global_batch_size": 16,
    "parity_steps": 2,
    "backend": backend.chosen(),
}
if not backend.always_compiles(backend.chosen()):
    OPTIONS["xla"] = "off"


def compare(fault: str, folder: str, clusters: tuple[cluster.Cluster, cluster.Cluster]) -> dict:
    """What parity.json says of a model, and the last line of an error."""
    name, *options = fault.split(":")
    texts = dict(option.split("=") for option in options)
    given = {key: config.parse(key, text) for key, text in texts.items()}
    settings = config.merge(OPTIONS | {"model_options": {"fault": name}, "model_dir": folder} | given)
    source = models.find(settings.model, settings.model_options)
    read = inputs.open_inputs(settings, "")
    run = run_dir.RunDir(folder)
    clock = Clock(0.0)

    def make(options: config.Config, devices: cluster.Cluster) -> Assembly:
        return Assembly(options, clock, source, read, run, devices)

    error = ""
    try:
        parity.compare_replicas(settings, make, clusters, run)
    except ConfigError as raised:
        error = str(raised)
    return json.loads(run.read(run_dir.PARITY) or "{}") | {"error": error}


def main() -> None:
    """Compares all that are named, by the same two clusters."""
    logging.basicConfig(level=logging.INFO if "-v" in sys.argv else logging.ERROR, stream=sys.stderr)
    clusters = cluster.rehearse(2)
    found = {}
    for fault in [word for word in sys.argv[1:] if word != "-v"]:
        with tempfile.TemporaryDirectory() as folder:
            found[fault] = compare(fault, folder, clusters)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
