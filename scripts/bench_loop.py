"""Our loop against a hand-written one, Keras 3 `fit`, tf-keras `fit` and Model Garden's Orbit, on the same work.

    python -m scripts.bench_loop [--replicas=1,2] [--cases='mlp 0.1 ms'] [--optimizers=sgd]

Needs the extra `bench`, and Orbit (see scripts/README.md). Models of about 0.1, 1 and 10 ms a step, 100 steps in a
loop, loss and accuracy tracked by all. First all contenders have to lose alike: the same weights and batches give the
same losses over 20 steps. Then they take turns: a contender is a process, and the others wait.
"""

import functools
import os
import sys
from collections.abc import Mapping

from scripts.benches import loop_work, results, turns

STEPS = 100  # in a loop
EQUAL_STEPS, TOLERANCE = 20, 1e-4
OURS, YARDSTICK = "ours", "by_hand"
# Functions of `loop_contenders`: what they are called, and the least that ours has to reach of their steps a second.
PEERS = {
    YARDSTICK: ("hand-written", 0.9),
    "keras_fit": ("Keras 3 fit", 1.0),
    "tf_keras_fit": ("tf-keras fit", 1.0),
    "orbit": ("Orbit", 1.0),
}


def contend(contender: str, replicas: int) -> None:
    """The process of a contender."""
    import tensorflow as tf

    from scripts.benches import loop_contenders

    cores = len(os.sched_getaffinity(0))
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    tf.config.threading.set_inter_op_parallelism_threads(cores)
    build = getattr(loop_contenders, contender)

    def make(what: str, steps: int) -> turns.Run:
        case, optimizer = what.split(", ")
        return build(loop_work.CASES[case], optimizer, replicas, steps)

    turns.serve(make)


def measure(
    report: results.Report, contenders: Mapping[str, turns.Contender], rounds: int, what: str, where: str
) -> None:
    """One model and optimizer on so many replicas: equal losses, then turns."""
    print(f"{what}, {where}")
    if not turns.lose_alike(turns.losses(contenders, what, EQUAL_STEPS), YARDSTICK, TOLERANCE):
        report.fail(f"{what}, {where}", f"losses differ by more than {TOLERANCE:g}")
        return
    loops = loop_work.CASES[what.split(", ")[0]].loops
    for one in contenders.values():
        one.ask(what, STEPS, 1)
    taken = turns.alternate(
        {n: functools.partial(one.ask, None, STEPS, loops) for n, one in contenders.items()}, rounds
    )
    for name, (label, bound) in PEERS.items():
        if name in contenders:
            note = f"{turns.step(taken, OURS)} / {turns.step(taken, name)}"
            ratios = turns.ratios(taken, OURS, name)
            report.add(f"{what}, {where}", f"ours / {label}", ratios, at_least=bound, note=note)


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = results.parser(__doc__, rounds=11)
    parser.add_argument("--replicas", default="1,2", help="virtual CPU devices (default 1,2)")
    parser.add_argument("--cases", default=",".join(loop_work.CASES), help=f"of {', '.join(loop_work.CASES)}")
    parser.add_argument("--optimizers", default=",".join(loop_work.OPTIMIZERS))
    parser.add_argument("--peers", default=",".join(PEERS), help="contenders beside ours and the hand-written loop")
    parser.add_argument("--contender", help="be one (used by the program itself)")
    arguments = parser.parse_args()
    if arguments.contender:
        contend(arguments.contender, int(arguments.replicas))
        return 0
    report = results.Report("loop", arguments.json)
    names = dict.fromkeys([OURS, YARDSTICK, *arguments.peers.split(",")])
    for replicas in arguments.replicas.split(","):
        where = f"{replicas} replica{'s' if replicas != '1' else ''}"
        flags = [f"--replicas={replicas}"]
        with turns.contenders("scripts.bench_loop", names, flags) as contenders:
            for case in arguments.cases.split(","):
                for optimizer in arguments.optimizers.split(","):
                    measure(report, contenders, arguments.rounds, f"{case}, {optimizer}", where)
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
