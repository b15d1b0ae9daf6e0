"""Memory of a run that goes on for long, what the allocator makes of its threads, and what is looked at for garbage."""

import gc
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ
from trainer import memory

# Pages that come and go. A leak of 300 bytes a step, or of 150 KB an evaluation or a checkpoint, is beyond.
_MOST_MIB = 3.0
_SETTLED, _END = 2_000, 12_000

_ARENAS = """
import ctypes, sys, threading
from trainer import memory
memory.share_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
allocated = threading.Barrier(32)
def allocate():
    libc.malloc(1000)
    allocated.wait()
threads = [threading.Thread(target=allocate) for _ in range(32)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.slow
def test_a_long_run_takes_no_more_memory(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    trainer.run(
        *(f"--model_dir={tmp_path}", "--model=mlp", "--model_options.units=[16]", "--global_batch_size=32"),
        *(f"--train_steps={_END}", "--eval_every_steps=500", "--log_every_steps=100"),
        environ={"MALLOC_ARENA_MAX": "1"},  # else it is chance when the last of them has got its buffers
    )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    resident = {record["step"]: record["train/host_memory_mib"] for record in records if "train/loss" in record}
    before = max(mib for step, mib in resident.items() if step <= _SETTLED)
    after = max(mib for step, mib in resident.items() if step > _END - 1_000)
    assert after - before < _MOST_MIB, resident


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize(("wanted", "most"), [({}, len(os.sched_getaffinity(0))), ({"MALLOC_ARENA_MAX": "1"}, 1)])
def test_threads_share_one_arena_a_core_unless_told_otherwise(wanted: dict[str, str], most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ARENAS],
        cwd=ROOT,
        env=clean_environ() | wanted,
        capture_output=True,
        text=True,
        timeout=GUARD_SECS,
        check=True,
    )
    assert 1 <= done.stdout.count("<heap nr=") <= most


def test_no_garbage_is_looked_for_while_libraries_are_imported(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    (tmp_path / "tensorflow.py").write_text("import gc; raise SystemExit(f'looks for garbage: {gc.isenabled()}')")
    process = trainer.start(f"--model_dir={tmp_path}/run", environ={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert "looks for garbage: False" in "".join(process.communicate(timeout=GUARD_SECS))


def test_garbage_is_looked_for_again_but_not_in_what_was_imported() -> None:
    try:
        with memory.importing():
            library: list[object] = [object()]
        of_run: list[object] = [object()]
        looked_at = {id(one) for one in gc.get_objects()}
        assert gc.isenabled()
        assert id(library) not in looked_at and id(of_run) in looked_at
        with pytest.raises(ImportError), memory.importing():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
