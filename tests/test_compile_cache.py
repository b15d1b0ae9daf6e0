"""`--compile_cache`: a second start finds what the first has compiled, and nothing that is not what was written."""

import os
import pathlib

import numpy as np
import pytest

from tests.conftest import Trainer, state_of
from trainer import backend, compile_cache, flags
from trainer.compile_cache import CompileCache
from trainer.errors import ConfigError

# Lets TensorFlow tell of every program that it finds kept, and of every one that it compiles; JAX does not ask for it.
TELLS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_executable_persistor=1"}
FOUND, COMPILED = "Verifying loaded cache entry", "Serializing and saving cache entry"


def _process(store: pathlib.Path, name: str) -> tuple[CompileCache, pathlib.Path]:
    """What a process has of the store: the cache, and the directory in which its library works."""
    store.mkdir(exist_ok=True)
    work = store / f".work-{name}"
    work.mkdir()
    return CompileCache(store, work), work


def _stored(store: pathlib.Path) -> dict[str, bytes]:
    return {path.name.rpartition(".")[0]: path.read_bytes() for path in compile_cache._entries(store)}


def _compiled(store: pathlib.Path, **programs: bytes) -> None:
    cache, work = _process(store, f"of-{'-'.join(programs)}")
    for name, program in programs.items():
        (work / name).write_bytes(program)
    cache.publish()


def test_another_process_finds_what_one_has_compiled(tmp_path: pathlib.Path) -> None:
    _compiled(tmp_path / "store", step=b"a program", test=b"another")
    cache, work = _process(tmp_path / "store", "later")
    assert sorted(cache.found) == ["step", "test"]
    assert (work / "step").read_bytes() == b"a program"


@pytest.mark.parametrize("damaged", [b"a prog", b"a pr0gram", b""])
def test_a_damaged_entry_is_compiled_again(tmp_path: pathlib.Path, damaged: bytes) -> None:
    _compiled(tmp_path / "store", step=b"a program")
    [entry] = compile_cache._entries(tmp_path / "store")
    entry.write_bytes(damaged)
    cache, work = _process(tmp_path / "store", "later")
    assert cache.found == []
    assert not (work / "step").exists()
    (work / "step").write_bytes(b"a program")
    cache.publish()
    assert _stored(tmp_path / "store") == {"step": b"a program"}


def test_processes_at_once_keep_what_each_has_compiled(tmp_path: pathlib.Path) -> None:
    (one, its_work), (other, others_work) = (_process(tmp_path / "store", name) for name in ("one", "other"))
    (its_work / "step").write_bytes(b"a program")
    (others_work / "step").write_bytes(b"a program")
    (others_work / "test").write_bytes(b"another")
    one.publish()
    other.publish()
    assert _stored(tmp_path / "store") == {"step": b"a program", "test": b"another"}


def test_what_was_not_used_for_longest_is_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 20)
    store = tmp_path / "store"
    for age, name in enumerate(("old", "used", "new")):
        _compiled(store, **{name: b"8 bytes."})
        for entry in store.glob(f"{name}.*"):
            os.utime(entry, (1000 * age, 1000 * age))
        if name == "used":
            os.utime(next(store.glob("old.*")), (5000, 5000))  # as a start does that finds it
    assert sorted(_stored(store)) == ["new", "old"]


def test_what_was_compiled_for_another_cpu_is_not_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    here = compile_cache.key()
    (tmp_path / "cpuinfo").write_text("model name : another\nflags : sse2\n\n")
    monkeypatch.setattr(compile_cache, "_CPU_INFO", tmp_path / "cpuinfo")
    assert compile_cache.key() != here


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_trains_the_same(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    kept = tmp_path / "kept"
    options = ["--model=mlp", "--train_steps=3", "--mode=train", f"--compile_cache={kept}"]
    options += ["--xla=on"] if backend.chosen() == "tensorflow" else []
    trainer.run(*options, f"--model_dir={tmp_path / 'first'}")
    [store] = kept.iterdir()
    stored = _stored(store)
    assert stored
    told = trainer.run(*options, f"--model_dir={tmp_path / 'second'}", environ=TELLS).stderr
    if backend.chosen() == "tensorflow":
        assert FOUND in told and COMPILED not in told
    assert _stored(store) == stored  # JAX writes anew what it compiles anew
    assert {path.name for path in store.iterdir()} == {path.name for path in compile_cache._entries(store)}
    first, second = (state_of(tmp_path / name) for name in ("first", "second"))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--compile_cache=gs://bucket/kept"], "that this machine has mounted"),
        (["--compile_cache=kept", "--backend=tensorflow", "--xla=off"], "no effect with xla=off"),
        (["--compile_cache=kept", "--backend=tensorflow", "--tpu=local"], "no effect with TensorFlow on TPUs"),
    ],
)
def test_it_is_refused_where_it_has_no_effect(options: list[str], reason: str) -> None:
    arguments = ["trainer", "--dataset=digits", "--model_dir=run", *options]
    with pytest.raises(ConfigError, match=reason):
        flags.merge(flags.layers(flags.parse(arguments), {}))
