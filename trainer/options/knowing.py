"""What is looked at before a run is paid for."""

import dataclasses

from trainer.options.field import option


@dataclasses.dataclass(frozen=True)
class KnowingOptions:
    """What is looked at before a run is paid for."""

    lint: str = option(
        "auto",
        "look over the model for what TPUs take badly, before it runs; auto: on a TPU and in preflight",
        group="knowing before",
        choices=("auto", "on", "off"),
        changes_numbers=False,
    )
    slice: str | None = option(
        None,
        "of preflight: TPU slices to compile for, with commas between: v5e-8, v3-32, or a topology such as v5e:2x4; "
        "default: the common ones over whose cores the batch divides",
        group="knowing before",
        modes=("preflight",),
        changes_numbers=False,
    )
    preflight_probes: int | None = option(
        None,
        "of preflight: compilations a slice that may be spent on finding the largest batch that fits; default: 5 where "
        "slice names it, else 0",
        group="knowing before",
        modes=("preflight",),
        minimum=0,
        changes_numbers=False,
    )
    preflight_timeout_secs: float = option(
        900.0,
        "of preflight: seconds after which a compilation is given up",
        group="knowing before",
        modes=("preflight",),
        above=0,
        changes_numbers=False,
    )
    preflight_python: str | None = option(
        None,
        "of preflight: the Python with the extra `preflight`, such as /opt/preflight/bin/python; default: this one",
        group="knowing before",
        modes=("preflight",),
        changes_numbers=False,
    )
    sweep_from: float = option(
        1e-6,
        "of sweep_lr: learning rate of the first step",
        group="knowing before",
        modes=("sweep_lr",),
        above=0,
        changes_numbers=False,
    )
    sweep_to: float = option(
        10.0,
        "of sweep_lr: learning rate of the last step, which is not done where the loss comes apart before",
        group="knowing before",
        modes=("sweep_lr",),
        above=0,
        changes_numbers=False,
    )
    sweep_steps: int = option(
        200,
        "of sweep_lr: steps, each with a learning rate larger by the same factor",
        group="knowing before",
        modes=("sweep_lr",),
        minimum=50,
        changes_numbers=False,
    )
    parity_steps: int = option(
        8,
        "of parity: training steps to compare",
        group="knowing before",
        modes=("parity",),
        minimum=1,
        changes_numbers=False,
    )
