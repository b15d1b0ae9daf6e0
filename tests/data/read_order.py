"""A host that reads: prints a line of record numbers for each step. Started by test_order_of_processes.py.

python read_order.py HOST HOSTS START STEPS DIRECTORY...: STEPS steps of the shards in each DIRECTORY, which holds a
counts.json too, leaving out the first START of all these steps.
python read_order.py bytes START DIRECTORY: how many bytes it has read from files once it holds the batch of step START.
"""

import json
import os
import pathlib
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import tensorflow as tf

from data import order, records

BATCH = 16


def open_split(directory: pathlib.Path) -> tuple[records.Split, order.Order]:
    """The shards that `test_order_of_processes.write` wrote, and their order."""
    facts = json.loads((directory / "counts.json").read_text())
    counts, num_bytes = tuple(facts["counts"]), facts["num_bytes"]
    split = records.Split(tuple(str(directory / f"shard-{shard}") for shard in range(len(counts))), counts, num_bytes)
    filled = tuple(count for _, count in split.filled)
    return split, order.plan(
        filled, split.record_bytes, seed=5, global_batch_size=BATCH, shuffle_mib=facts["shuffle_mib"]
    )


def bytes_read() -> int:
    """By this process, as the operating system counts them."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def read(directory: str, share: records.Share, start: int) -> tf.data.Dataset:
    """Vectors of records, one each step."""
    split, planned = open_split(pathlib.Path(directory))
    return records.training_records(split, planned, share, lambda batch, step, row: batch, start_step=start)


def main(host: int, hosts: int, start: int, steps: int, directories: list[str]) -> None:
    """Reads and prints record numbers."""
    share = records.Share(BATCH, BATCH // hosts, host, hosts)
    for number, directory in enumerate(directories):
        begin = max(start - number * steps, 0)
        if begin < steps:
            for batch in read(directory, share, begin).take(steps - begin):
                print(" ".join(record.split(b":")[0].decode() for record in batch.numpy()), flush=True)


def print_bytes(start: int, directory: str) -> None:
    """Reads one batch."""
    before = bytes_read()
    next(iter(read(directory, records.Share(BATCH, BATCH), start)))
    print(bytes_read() - before)


if __name__ == "__main__":
    if sys.argv[1] == "bytes":
        print_bytes(int(sys.argv[2]), sys.argv[3])
    else:
        main(*map(int, sys.argv[1:5]), sys.argv[5:])
