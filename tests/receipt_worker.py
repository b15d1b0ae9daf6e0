"""Processes of one run that write its receipt, for tests of what it sums to.

`python -m tests.receipt_worker MODEL_DIR END ...`: one process for each END, forked one after the other, each going on
two steps before where the last one came to. END is an exit code, or `kill`: SIGKILL right after the receipt is written.
"""

import os
import signal
import sys
import time

from trainer import receipt, run_dir
from trainer.callbacks import Loop, clock


def main(model_dir: str, *ends: str) -> None:
    """Runs all processes."""
    for end in ends:
        pid = os.fork()
        if pid == 0:
            os._exit(run(model_dir, end))
        expected = -signal.SIGKILL if end == "kill" else int(end)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != expected:
            sys.exit(f"the process that was to end with {end} did not")


def run(model_dir: str, end: str) -> int:
    """One process: ten loops of one step, of 5 ms each, on 4 devices."""
    account = clock.Clock(time.monotonic())
    folder = run_dir.RunDir(model_dir)
    bill = receipt.Receipt(
        folder.read(run_dir.RECEIPT),
        seconds=account.seconds,
        write=lambda text: folder.replace(run_dir.RECEIPT, text),
    )
    start = max(0, bill.reached_before - 2)
    bill.from_step, bill.num_devices = start, 4
    timer = clock.LoopClock(account, start_step=start, reached_before=bill.reached_before)
    account.start_is_over()
    for step in range(start, start + 10):
        timer.on_loop_begin(step)
        begun = time.monotonic()
        time.sleep(0.005)
        seconds = time.monotonic() - begun
        timer.on_loop_end(Loop(step, step + 1, seconds, 0.0, {}, 0.1, first=step == start))
        bill.reached_step = timer.reached_step
    bill.write()
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    bill.finish(int(end))
    return int(end)


if __name__ == "__main__":
    main(*sys.argv[1:])
