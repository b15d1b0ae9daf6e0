"""`--mode=profile_input`: where the input pipeline of a training run spends its time."""

import json
import logging

import tensorflow as tf

from data import stages
from trainer import console, logs, profile_input, profile_picture, profile_report, run_dir
from trainer.assembly import Assembly

_log = logging.getLogger(__name__)


def measure_input(run: Assembly) -> None:
    """Measures the pipeline of a training run; writes what it found, and nothing that a training run writes."""
    _log.info("%s", run.summary(0))
    timed = run.inputs.train_stages(run.plan, tf.distribute.InputContext())
    handed_over = stages.Stage(
        profile_report.TRANSFER,
        lambda seed: run.train_batches(0, seed),
        timed[-1].window // run.plan.num_replicas or 1,
    )
    timed.append(handed_over)
    names = ", ".join(stage.name for stage in timed)
    _log.info("measuring %s and the model by turns, for about a minute", names)
    measured = profile_input.measure(
        timed, run.replicated, steps_per_loop=run.plan.steps_per_loop, seed=run.config.seed
    )
    circumstances = profile_input.circumstances(
        run.inputs.dataset,
        run.config,
        measured.images,
        device_kind=run.devices.kind,
        devices=run.devices.description,
    )
    profile = profile_report.Profile(measured.stages, measured.model, circumstances)
    run.folder.write(run_dir.INPUT_PROFILE, json.dumps(profile_report.to_json(profile), indent=2) + "\n")
    run.folder.write(run_dir.INPUT_PICTURE, profile_picture.svg(profile))
    files = [(name, run.folder.file(name)) for name in (run_dir.INPUT_PROFILE, run_dir.INPUT_PICTURE)]
    _log.log(logs.RESULT, "%s", console.columns(profile_report.rows(profile)))
    _log.log(logs.RESULT, "%s", console.table([*profile_report.summary(profile), *files]))
