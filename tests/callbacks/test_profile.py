"""Profiles of a run: asked for beforehand or by a signal."""

import logging
import os
import pathlib
import signal

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from trainer import config
from trainer.callbacks import Loop, profile


@tf.function
def _work(x: tf.Tensor) -> tf.Tensor:
    return tf.linalg.matmul(x, x)


class _Requests:
    """What SIGUSR1 asks for."""

    def __init__(self) -> None:
        self._asked = False
        self._before = signal.signal(signal.SIGUSR1, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True

    def __call__(self) -> bool:
        asked, self._asked = self._asked, False
        return asked

    def close(self) -> None:
        signal.signal(signal.SIGUSR1, self._before)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "trainer")
    return caplog


def _loop(made: profile.Profile, begin: int, end: int) -> None:
    made.on_loop_begin(begin)
    for _ in range(begin, end):
        _work(tf.ones((64, 64)))
    made.on_loop_end(Loop(begin, end, 0.01, 0.0, {}, 0.1, first=False))


def _steps_in(directory: pathlib.Path) -> list[int]:
    """First steps of the loops in the only profile below `directory`."""
    (file,) = directory.glob("plugins/profile/*/*.xplane.pb")
    steps = []
    for plane in xplane_pb2.XSpace.FromString(file.read_bytes()).planes:
        for event in (event for line in plane.lines for event in line.events):
            if plane.event_metadata[event.metadata_id].name == "train":
                stats = {plane.stat_metadata[stat.metadata_id].name: stat for stat in event.stats}
                steps.append(stats["step_num"].int64_value or stats["step_num"].uint64_value)
    return sorted(steps)


def _never() -> bool:
    return False


def test_it_holds_the_steps_that_were_asked_for(tmp_path: pathlib.Path, said: pytest.LogCaptureFixture) -> None:
    made = profile.Profile(str(tmp_path), steps=(20, 40), requested=_never, start_step=0)
    for begin in range(0, 60, 10):
        _loop(made, begin, begin + 10)
    made.on_end()
    assert _steps_in(tmp_path) == [20, 30]
    assert f"profile of steps 20 to 39: {tmp_path}/plugins/profile" in said.text
    assert f"tensorboard --logdir={tmp_path}" in said.text


def test_a_signal_profiles_whole_loops_of_a_running_job(
    tmp_path: pathlib.Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "ON_REQUEST_SECS", 0.0)
    requests = _Requests()
    try:
        made = profile.Profile(str(tmp_path), steps=None, requested=requests, start_step=0)
        _loop(made, 0, 10)
        assert not list(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGUSR1)
        _loop(made, 10, 20)
        _loop(made, 20, 30)
    finally:
        requests.close()
    assert _steps_in(tmp_path) == [10]
    assert "profile of steps 10 to 19" in said.text


def test_a_profile_survives_the_end_of_the_run(tmp_path: pathlib.Path) -> None:
    made = profile.Profile(str(tmp_path), steps=(10, 1000), requested=_never, start_step=0)
    _loop(made, 0, 10)
    _loop(made, 10, 20)
    made.on_loop_begin(20)  # an error leaves the loop
    made.on_end()
    assert _steps_in(tmp_path) == [10, 20]
    tf.profiler.experimental.start(str(tmp_path / "next"))  # the profiler is free again
    tf.profiler.experimental.stop(save=False)


def test_a_run_beyond_the_steps_says_so_once(tmp_path: pathlib.Path, said: pytest.LogCaptureFixture) -> None:
    made = profile.Profile(str(tmp_path), steps=(20, 40), requested=_never, start_step=40)
    _loop(made, 40, 50)
    made.on_end()
    assert not list(tmp_path.iterdir())
    assert said.messages == ["profile_steps=20,40: the run goes on from step 40, so nothing is profiled"]


def test_a_run_that_goes_on_amid_the_steps_profiles_the_rest(tmp_path: pathlib.Path) -> None:
    made = profile.Profile(str(tmp_path), steps=(20, 40), requested=_never, start_step=30)
    _loop(made, 30, 40)
    _loop(made, 40, 50)
    assert _steps_in(tmp_path) == [30]


def test_a_profiler_in_use_is_a_warning(tmp_path: pathlib.Path, said: pytest.LogCaptureFixture) -> None:
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        made = profile.Profile(str(tmp_path), steps=(0, 20), requested=_never, start_step=0)
        _loop(made, 0, 10)
        _loop(made, 10, 20)
        made.on_end()
    finally:
        tf.profiler.experimental.stop(save=False)
    (warning,) = said.records
    assert warning.levelno == logging.WARNING
    assert "the profiler does not start" in warning.getMessage()


def test_a_place_that_cannot_be_written_is_a_warning(tmp_path: pathlib.Path, said: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    made = profile.Profile(str(tmp_path / "file"), steps=(0, 10), requested=_never, start_step=0)
    _loop(made, 0, 10)
    _loop(made, 10, 20)
    made.on_end()
    assert [record.levelname for record in said.records if record.levelno > logging.INFO] == ["WARNING"]


def test_profile_steps_are_two_steps() -> None:
    assert config.profile_range("100, 110") == (100, 110)
    for wrong in ("", "5", "5,5", "7,5", "-1,5", "1,2,3", "a,b", "1.5,2", "²,3"):
        with pytest.raises(ValueError, match=r"profile_steps .*Received: "):
            config.profile_range(wrong)
