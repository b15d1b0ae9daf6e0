"""Batch and step arithmetic: what a config means on this hardware and this data. Pure."""

import dataclasses
import math

from trainer import durations
from trainer.config import Config, profile_range
from trainer.errors import ConfigError

DEFAULT_EPOCHS = 10.0


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """The learning rate over a run, in steps: `schedule` names its form after the warm-up.

    peak: at the end of the warm-up, scaled to the batch. decay_steps: steps done at each decay_at. Others as in
    `options/optimizer.py`; what was not given is 0.
    """

    schedule: str
    peak: float
    train_steps: int
    warmup_steps: int = 0
    decay_steps: tuple[int, ...] = ()
    decay_every_steps: int = 0
    decay_factor: float = 0.0
    decay_power: float = 1.0
    final_factor: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Steps and batches of a run. Nothing but `per_replica_batch_size` depends on the number of replicas."""

    global_batch_size: int
    per_replica_batch_size: int
    num_replicas: int
    train_steps: int
    steps_per_epoch: float
    eval_steps: int
    eval_every_steps: int
    checkpoint_every_steps: int
    log_every_steps: int
    steps_per_loop: int
    profile_steps: tuple[int, int] | None  # (A, B): steps A..B-1 are profiled
    learning_rate: LearningRate

    def is_checkpoint(self, step: int) -> bool:
        """Whether a checkpoint is due once `step` steps are done."""
        return step % self.checkpoint_every_steps == 0 or step == self.train_steps

    def ends_segment(self, step: int) -> bool:
        """Whether an evaluation is due once `step` steps are done."""
        return step % self.eval_every_steps == 0 or step == self.train_steps

    def is_report(self, step: int) -> bool:
        """Whether metrics are written and reset once `step` steps are done."""
        return step % self.log_every_steps == 0 or self.ends_segment(step)

    def loop_end(self, step: int, longest: int) -> int:
        """Where the loop that begins at `step` ends: where anything is due, and after `longest` steps at most.

        So every interval lands on its exact step, whatever the length of loops.
        """
        intervals = (self.eval_every_steps, self.checkpoint_every_steps, self.log_every_steps)
        due = [(step // every + 1) * every for every in intervals]
        due += [stop for stop in self.profile_steps or () if stop > step]
        return min(self.train_steps, step + longest, *due)

    def eval_loops(self) -> list[tuple[int, int]]:
        """Loops (begin, end) over the evaluation batches."""
        starts = range(0, self.eval_steps, self.steps_per_loop)
        return [(start, min(start + self.steps_per_loop, self.eval_steps)) for start in starts]


def resolve(config: Config, *, num_replicas: int, num_train_examples: int, num_eval_examples: int) -> Plan:
    """The plan of `config` on `num_replicas` replicas and this many examples; 0 of what the mode does not read.

    Raises:
        ConfigError: the global batch does not divide by the replicas; names the nearest sizes that do. Or a warm-up
            or a decay is not within the training.
    """
    batch, share = config.global_batch_size, _share(config, num_replicas, trains=num_train_examples > 0)
    steps_per_epoch = num_train_examples / batch
    train_steps = _train_steps(config, steps_per_epoch)
    learning_rate = _learning_rate(config, train_steps, steps_per_epoch)
    if num_train_examples:  # else nothing is trained, and neither epochs nor the training have a length
        _check_order(config, learning_rate)
    eval_every = config.eval_every_steps or max(1, round(steps_per_epoch))
    return Plan(
        global_batch_size=batch,
        per_replica_batch_size=share,
        num_replicas=num_replicas,
        train_steps=train_steps,
        steps_per_epoch=steps_per_epoch,
        eval_steps=math.ceil(num_eval_examples / batch),
        eval_every_steps=eval_every,
        checkpoint_every_steps=config.checkpoint_every_steps or eval_every,
        log_every_steps=config.log_every_steps,
        steps_per_loop=config.steps_per_loop,
        profile_steps=profile_range(config.profile_steps) if config.profile_steps else None,
        learning_rate=learning_rate,
    )


def _share(config: Config, num_replicas: int, *, trains: bool) -> int:
    """Of a replica, in examples. Only training divides it further: evaluation may have another batch or hardware."""
    batch = config.global_batch_size
    if batch % num_replicas:
        sizes = _nearest_sizes(batch, num_replicas)
        raise ConfigError(
            f"global_batch_size must divide by the {num_replicas} replicas. Received: {batch}. Nearest sizes: {sizes}"
        )
    share = batch // num_replicas
    if trains and share % config.microbatches:
        raise ConfigError(
            f"microbatches must divide a replica's share of the batch, {share} examples ({batch} over {num_replicas} "
            f"replicas). Received: {config.microbatches}"
        )
    if trains and (config.mixup or config.cutmix) and share % 2:
        sizes = _nearest_sizes(batch, 2 * num_replicas)
        raise ConfigError(
            "mixup and cutmix mix pairs of examples, so each replica must have an even number of them. Received: "
            f"global_batch_size={batch}, {share} on each of {num_replicas}. Nearest sizes: {sizes}"
        )
    return share


def _nearest_sizes(batch: int, divisor: int) -> str:
    lower = batch // divisor * divisor
    return " or ".join(str(size) for size in (lower, lower + divisor) if size)


def _train_steps(config: Config, steps_per_epoch: float) -> int:
    if config.train_steps is not None:
        return config.train_steps
    if config.train_examples is not None:
        return max(1, math.ceil(config.train_examples / config.global_batch_size))
    return max(1, math.ceil((config.train_epochs or DEFAULT_EPOCHS) * steps_per_epoch))


def _learning_rate(config: Config, train_steps: int, steps_per_epoch: float) -> LearningRate:
    def steps(name: str) -> tuple[int, ...]:
        text = getattr(config, name)
        listed = durations.parse_all(name, text) if text is not None else []
        batch = config.global_batch_size
        return tuple(d.steps(train_steps=train_steps, steps_per_epoch=steps_per_epoch, batch=batch) for d in listed)

    scale = config.global_batch_size / (config.learning_rate_batch_size or config.global_batch_size)
    return LearningRate(
        schedule=config.schedule,
        peak=config.learning_rate * (math.sqrt(scale) if config.learning_rate_scaling == "sqrt" else scale),
        train_steps=train_steps,
        warmup_steps=sum(steps("warmup")),
        decay_steps=steps("decay_at"),
        decay_every_steps=sum(steps("decay_every")),
        decay_factor=config.decay_factor or 0.0,
        decay_power=config.decay_power,
        final_factor=config.final_learning_rate_factor,
    )


def _check_order(config: Config, planned: LearningRate) -> None:
    """Warm-up, decays, end: what lies elsewhere would never come about."""
    if planned.warmup_steps >= planned.train_steps:
        raise ConfigError(
            "warmup must end before the training does. "
            f"Received: {config.warmup!r}, {planned.warmup_steps:,} of {planned.train_steps:,} steps"
        )
    marks = (planned.warmup_steps, *planned.decay_steps, planned.train_steps)
    if planned.decay_steps and (list(marks[1:]) != sorted(set(marks[1:])) or marks[0] > marks[1]):
        raise ConfigError(
            f"decay_at must rise, from the end of the warm-up ({planned.warmup_steps:,} steps) to before that of the "
            f"training ({planned.train_steps:,}). "
            f"Received: {config.decay_at!r}, {', '.join(f'{step:,}' for step in planned.decay_steps)} steps"
        )
    if config.decay_every is not None and not planned.decay_every_steps:
        raise ConfigError(f"decay_every must be a step at least. Received: {config.decay_every!r}")
