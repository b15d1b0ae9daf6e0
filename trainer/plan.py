"""Batch and step arithmetic: what a config means on this hardware and this data. Pure."""

import dataclasses
import math

from trainer.config import Config, profile_range
from trainer.errors import ConfigError

DEFAULT_EPOCHS = 10.0


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
        ConfigError: the global batch does not divide by the replicas; names the nearest sizes that do.
    """
    batch = config.global_batch_size
    if batch % num_replicas:
        lower = batch // num_replicas * num_replicas
        sizes = " or ".join(str(size) for size in (lower, lower + num_replicas) if size)
        raise ConfigError(
            f"global_batch_size must divide by the {num_replicas} replicas. Received: {batch}. Nearest sizes: {sizes}"
        )
    share = batch // num_replicas
    if share % config.microbatches:
        raise ConfigError(
            f"microbatches must divide a replica's share of the batch, {share} examples ({batch} over {num_replicas} "
            f"replicas). Received: {config.microbatches}"
        )
    if (config.mixup or config.cutmix) and share % 2:
        pairs = 2 * num_replicas
        lower = batch // pairs * pairs
        sizes = " or ".join(str(size) for size in (lower, lower + pairs) if size)
        raise ConfigError(
            "mixup and cutmix mix pairs of examples, so each replica must have an even number of them. Received: "
            f"global_batch_size={batch}, {share} on each of {num_replicas}. Nearest sizes: {sizes}"
        )
    steps_per_epoch = num_train_examples / batch
    train_steps = config.train_steps
    if train_steps is None:
        train_steps = max(1, math.ceil((config.train_epochs or DEFAULT_EPOCHS) * steps_per_epoch))
    if num_train_examples and config.warmup_steps >= train_steps:
        raise ConfigError(
            f"warmup_steps must be below the number of training steps. Received: {config.warmup_steps} of {train_steps}"
        )
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
    )
