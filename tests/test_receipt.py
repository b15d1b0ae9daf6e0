"""The account of a run, summed over its restarts."""

import json
import pathlib
import subprocess
import sys
import time

import pytest

from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import guard, receipt, run_dir
from trainer.callbacks.clock import Clock
from trainer.config import Config
from trainer.watch.stopping import Stops

HOUR = 3600.0


class _Machine:
    """Clocks of a machine, and starts of one run on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.wall, self.monotonic, self.boot = 1.8e9, 5000.0, "first boot"
        self.text: str | None = None
        self._begun = 0.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)
        monkeypatch.setattr(receipt, "_boot_id", lambda: self.boot)

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def start(self) -> receipt.Receipt:
        """A process that does nothing but steps."""
        begun = self.monotonic
        made = receipt.Receipt(
            self.text, seconds=lambda: {"steps": self.monotonic - begun}, write=lambda text: setattr(self, "text", text)
        )
        made.num_devices = 8
        return made

    def reboots(self) -> None:
        self.boot, self.monotonic = f"{self.boot}, then another", 10.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    return _Machine(monkeypatch)


def test_it_sums_over_real_starts_one_of_them_killed(tmp_path: pathlib.Path) -> None:
    begun = time.monotonic()
    command = [sys.executable, "-m", "tests.receipt_worker", str(tmp_path), "75", "kill", "0"]
    subprocess.run(command, cwd=ROOT, env=clean_environ(), check=True, timeout=GUARD_SECS)
    elapsed = time.monotonic() - begun

    account = json.loads((tmp_path / "receipt.json").read_text())
    starts = account["starts"]
    assert [start["exit_code"] for start in starts] == [75, None, 0]
    assert [(start["from_step"], start["reached_step"]) for start in starts] == [(0, 10), (8, 18), (16, 26)]
    ages = [sum(start["seconds"].values()) for start in starts]
    waits = [start["waited_secs"] for start in starts]
    assert waits[0] == 0
    assert min(waits[1:]) >= 0
    assert account["wall_secs"] == pytest.approx(sum(ages) + sum(waits), abs=0.01)
    assert account["wall_secs"] < elapsed
    assert account["device_seconds"] == pytest.approx(4 * sum(ages), abs=0.1)
    # Of ten loops the first compiles; after a restart the second does a step that was done before.
    seconds = account["seconds"]
    assert seconds["steps"] >= 0.005 * (9 + 8 + 8) - 0.001
    assert seconds["recomputed"] >= 0.005 * 2 - 0.001
    assert seconds["compiling"] >= 0.005 * 3 - 0.001
    assert seconds["waiting"] == pytest.approx(sum(waits), abs=0.01)
    assert account["goodput_percent"] == pytest.approx(100 * seconds["steps"] / account["wall_secs"], abs=0.1)
    assert not account["notes"]


def test_it_knows_of_a_start_before_anything_can_kill_it(tmp_path: pathlib.Path) -> None:
    config = Config(model_dir=str(tmp_path))
    watched = guard.Guard(config, run_dir.RunDir(str(tmp_path)), Clock(time.monotonic()), Stops(), is_chief=True)
    watched.take_over(num_devices=3)
    [start] = json.loads((tmp_path / run_dir.RECEIPT).read_text())["starts"]
    watched.end(75)
    assert (start["exit_code"], start["num_devices"]) == (None, 3)


def test_waiting_between_starts_lowers_the_goodput(machine: _Machine) -> None:
    first = machine.start()
    machine.passes(60.0)
    first.finish(75)
    machine.passes(20.0)
    second = machine.start()
    machine.passes(20.0)
    account = second.account()
    assert (account["wall_secs"], account["seconds"]["waiting"]) == (100.0, 20.0)
    assert (account["goodput_percent"], account["goodput_percent_while_running"]) == (80.0, 100.0)
    assert account["device_seconds"] == 8 * 80.0
    rows = dict(second.rows())
    assert rows["time, waiting"].split() == ["20.0", "s", "20.0%"]
    assert rows["goodput"] == "80.0%, 100.0% while running"
    assert rows["starts"] == "2; the earlier ones ended with 75"


@pytest.mark.parametrize("jump", [-5 * HOUR, 5 * HOUR, 1e9])
def test_no_jump_of_the_wall_clock_matters_on_one_boot(machine: _Machine, jump: float) -> None:
    first = machine.start()
    machine.passes(60.0)
    first.write()
    machine.wall += jump
    machine.passes(20.0)
    second = machine.start()
    machine.passes(10.0)
    machine.wall -= jump / 2
    machine.passes(10.0)
    account = second.account()
    assert (account["wall_secs"], account["goodput_percent"], account["notes"]) == (100.0, 80.0, [])


def test_a_clock_that_is_set_right_after_the_start_does_no_harm(machine: _Machine) -> None:
    # A machine that boots with a wrong clock and then hears of the time.
    first = machine.start()
    machine.passes(60.0)
    first.write()
    machine.passes(20.0)
    right = machine.wall
    machine.reboots()
    machine.wall = 0.0
    second = machine.start()
    assert second.account()["seconds"]["waiting"] == 0.0
    machine.passes(5.0)
    machine.wall = right + 5.0
    machine.passes(15.0)
    account = second.account()
    assert (account["wall_secs"], account["goodput_percent"], account["notes"]) == (100.0, 80.0, [])


def test_a_clock_that_went_back_gives_no_negative_wait(machine: _Machine) -> None:
    first = machine.start()
    machine.passes(60.0)
    first.write()
    machine.reboots()
    machine.wall -= 2 * HOUR
    second = machine.start()
    machine.passes(40.0)
    account = second.account()
    assert (account["wall_secs"], account["seconds"]["waiting"], account["goodput_percent"]) == (100.0, 0.0, 100.0)
    assert account["notes"] == [
        "start 2: began 7,200 s before the one before it ended, by the wall clock; the wait between them counts as 0"
    ]
    assert ("note", account["notes"][0]) in second.rows()


def test_a_clock_that_jumped_ahead_is_told(machine: _Machine) -> None:
    first = machine.start()
    machine.passes(60.0)
    first.write()
    machine.reboots()
    machine.wall += 1000 * HOUR
    second = machine.start()
    machine.passes(40.0)
    account = second.account()
    assert account["goodput_percent"] < 1
    assert account["goodput_percent_while_running"] == 100.0
    assert "began 1,000.0 h after the one before it ended, by the wall clock" in account["notes"][0]


def test_a_receipt_that_cannot_be_written_is_one_warning(machine: _Machine, caplog: pytest.LogCaptureFixture) -> None:
    def full(text: str) -> None:
        raise OSError("no space left on device")

    bill = receipt.Receipt(None, seconds=lambda: {"steps": 1.0}, write=full)
    assert not bill.write()
    assert not bill.finish(0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no space left on device" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"starts": [{"seconds": {}}]}', '{"starts": [1]}', '{"starts": null}']
)
def test_a_text_that_is_no_receipt_does_not_end_the_run(
    machine: _Machine, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    machine.text = text
    bill = machine.start()
    machine.passes(1.0)
    assert bill.finish(0)
    assert json.loads(machine.text)["wall_secs"] == 1.0
    assert "the receipt of the earlier starts cannot be read" in caplog.text
