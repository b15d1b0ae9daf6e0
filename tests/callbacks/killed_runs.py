"""A run of 60 steps whose processes are killed, for tests of what its records look like afterwards.

`python -m tests.callbacks.killed_runs MODEL_DIR DISK MOMENT:STEP ...`: for each argument one process goes on from the
last checkpoint and kills itself with SIGKILL there; the last process runs to the end. TensorFlow is imported once and
the processes are forked from there, before it has threads. DISK is `real`, or `store`: records are then held back
until a flush, as on an object store, wherever MODEL_DIR is.
"""

import os
import signal
import sys

from trainer import run_dir
from trainer.callbacks import Loop, buffered, events, metrics, records

STEPS = 60
CHECKPOINT_FILE = "step"
LOOP, REPORT, EVALUATION, CHECKPOINT = 2, 4, 20, 10


def is_report(step: int) -> bool:
    """Also where an evaluation or a checkpoint is due, as in trainer/plan.py."""
    return step % REPORT == 0 or step % EVALUATION == 0 or step % CHECKPOINT == 0


def main(model_dir: str, disk: str, *moments: str) -> None:
    """Runs until the end, with a death at each of `moments`."""
    if disk == "store":
        metrics.is_object_store = buffered.is_object_store = lambda path: True
    for moment in (*moments, "never:0"):
        pid = os.fork()
        if pid == 0:
            os._exit(run(model_dir, moment))
        status = os.waitpid(pid, 0)[1]
        code = 0 if moment == "never:0" else -signal.SIGKILL
        if os.waitstatus_to_exitcode(status) != code:
            sys.exit(f"{moment} ended with {status}")


def run(model_dir: str, moment: str) -> int:
    """One process."""
    folder = run_dir.RunDir(model_dir)
    start = int(folder.read(CHECKPOINT_FILE) or 0)

    def at(name: str, step: int) -> None:
        if f"{name}:{step}" == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    file = metrics.MetricsFile(folder.file(run_dir.METRICS), lambda text: folder.replace(run_dir.METRICS, text))
    board = events.Events(folder.file(run_dir.TENSORBOARD))
    log = records.Records(is_report, [file, board], global_batch_size=8, start_step=start)
    for begin in range(start, STEPS, LOOP):
        step = begin + LOOP
        log.on_loop_end(Loop(begin, step, 0.01, 0.001, {"loss": 1.0 / step}, 0.1, first=begin == start))
        at("loop", step)
        if step % EVALUATION == 0:
            log.on_evaluation(step, {"accuracy": step / STEPS})
            at("evaluation", step)
        if step % CHECKPOINT == 0:
            log.flush()
            at("flush", step)
            folder.replace(CHECKPOINT_FILE, str(step))
            at("checkpoint", step)
    log.on_end()
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
