"""What a run is, where it is kept, and which one of a series it is."""

import dataclasses

from trainer.options.field import TRAINING, TRYING, option


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a run is, where it is kept, and which one of a series it is."""

    mode: str = option(
        "train_and_eval",
        "what to do; eval and export take the newest checkpoint and, where not given, the options of model_dir; report "
        "writes a page about the run there; "
        "the others take the options of a training run and keep nothing that they train: profile_input measures its "
        "input, sweep_lr looks for its peak learning rate, preflight compiles its steps for TPU slices, parity "
        "compares it on one and on several replicas, doctor looks at everything around it",
        group="run",
        choices=("train_and_eval", "train", "eval", "export", "report", *TRYING),
        changes_numbers=False,
    )
    model_dir: str = option(
        "",
        "directory of this run: config, checkpoints, logs, export; with run_id, of the runs of a series",
        group="run",
        changes_numbers=False,
    )
    runs: str | None = option(
        None,
        "of report: runs to show side by side, with commas between: directories, or names of runs below model_dir; "
        "the page goes to model_dir",
        group="run",
        modes=("report",),
        changes_numbers=False,
    )
    export_dir: str | None = option(
        None,
        "where the export goes; default: export in model_dir",
        group="run",
        modes=("train_and_eval", "export", *TRYING),
        changes_numbers=False,
    )
    tensorboard_dir: str | None = option(
        None,
        "where TensorBoard's files go; default: tensorboard in model_dir",
        group="run",
        modes=(*TRAINING, *TRYING),
        changes_numbers=False,
    )
    seed: int = option(0, "seed of initial weights, data order and dropout", group="run", minimum=0, below=2**31)
    allow_config_change: bool = option(
        False,
        "resume although options that change the numbers differ from those model_dir was trained with",
        group="run",
        changes_numbers=False,
    )
    checkpoint: str = option(
        "newest",
        "which checkpoint eval and export take: the newest, or the best by best_metric",
        group="run",
        choices=("newest", "best"),
        changes_numbers=False,
    )
    run_id: str | None = option(
        None,
        "makes model_dir a series of runs, and names this one in it: any text, with {date}, {hour}, {week} or {month} "
        "of its start in UTC, {job} and {trial} of Vertex AI; where it names a time, a run of the series that has not "
        "finished comes first",
        group="series",
        modes=(*TRAINING, *TRYING),
        changes_numbers=False,
    )
    if_new_data: bool = option(
        False,
        "begin a run only if the training split is not what the last finished run of the series was trained on; else "
        "there is nothing to do",
        group="series",
        modes=(*TRAINING, *TRYING),
        changes_numbers=False,
    )
    promote_margin: float | None = option(
        None,
        "let serving.json of the series name the run's export, if it beats the one named there by more than this in "
        "best_metric, both evaluated on eval_split as it is now; default: nothing is promoted",
        group="series",
        minimum=0,
        modes=("train_and_eval", *TRYING),
        changes_numbers=False,
    )
    keep_runs: int | None = option(
        None,
        "newest finished runs of the series to keep, besides the two promoted last; older ones are removed once this "
        "one has finished; default: all",
        group="series",
        minimum=1,
        modes=(*TRAINING, *TRYING),
        changes_numbers=False,
    )
