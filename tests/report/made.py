"""Directories of runs that were never trained, with everything in them that a report tells of."""

import base64
import dataclasses
import json
import math
import pathlib
import struct
import zlib

from trainer import config as config_lib
from trainer.checkpoints.directory import Marker
from trainer.postmortem import Finding, Record
from trainer.watch import status

STEPS, EVERY = 2400, 20
RESTARTS = (800, 1500)
EVIL = "<script>document.title='evil'</script>"
SECRET = "T0123SECRET"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", EVIL, "frog", "horse", "ship", "truck"]


def run(directory: pathlib.Path, *, seed: float = 0.0, **options) -> pathlib.Path:
    """A run that was killed, preempted and finished, with alerts, a post-mortem and examples."""
    directory.mkdir(parents=True)
    given = {
        "dataset": "cifar10",
        "model": "cnn",
        "train_steps": STEPS,
        "learning_rate": 2e-3,
        "best_metric": "accuracy",
    }
    config = config_lib.merge({**given, "best_goal": "max", "model_dir": str(directory), **options})
    _write(directory, "config.json", json.loads(config_lib.to_json(config)))
    _write(directory, "provenance.json", {"starts": [_start(step) for step in (0, *RESTARTS)]})
    _write(directory, "receipt.json", receipt())
    _write(directory, "examples.json", examples())
    _lines(directory, "metrics.jsonl", records(seed))
    _lines(directory, "alerts.jsonl", alerts())
    last = status.new_status(None)
    ended = dataclasses.replace(
        last, state="finished", exit_code=0, step=STEPS, host="vm-1", time="2026-11-29T04:00:00+00:00"
    )
    _write(directory, "status.json", dataclasses.asdict(ended))
    found = Finding(
        1240, 1.5e-3, "the output of layer conv_2", math.nan, {"conv_2/kernel": math.nan}, [Record("a", 7)], []
    )
    (directory / "postmortem-1240.json").write_text(found.to_json())
    for serial, step in enumerate((2200, STEPS)):
        _checkpoint(directory / "checkpoints" / str(step), serial, step)
    return directory


def records(seed: float = 0.0) -> list[dict]:
    """Of metrics.jsonl, with one loss that is not finite."""
    found = []
    for step in range(EVERY, STEPS + 1, EVERY):
        fall, noise = math.exp(-step / 500), math.sin(step * 0.7 + seed) * 0.05
        values = {
            "loss": 0.25 + 2.2 * fall * (1 + 0.1 * seed) + noise,
            "accuracy": 0.93 - 0.83 * fall + noise / 5,
            "gradient_norm": 0.8 + 6 * fall + 10 * noise**2,
            "learning_rate": 1e-3 * (1 + math.cos(math.pi * step / STEPS)),
            "examples_per_sec": 5200 + 9000 * noise,
            "step_ms": 24.6 - 30 * noise,
            "input_wait_ms": 3.0 if 900 < step < 1100 else 0.2 + abs(noise),
            "host_memory_mib": 800 + step / 60,
        }
        if step == 1240:
            values["loss"] = "NaN"
        found.append({"step": step, **{f"train/{name}": value for name, value in values.items()}})
        if step % 200 == 0:
            evaluated = {"loss": 0.4 + 2 * fall * (1 + 0.1 * seed) + step / 20000, "accuracy": 0.9 - 0.8 * fall}
            found.append({"step": step, **{f"eval/{name}": value for name, value in evaluated.items()}})
    return found


def alerts() -> list[dict]:
    """Of alerts.jsonl."""
    told = [
        ("preempted", "WARNING", 800, "asked to stop by preemption notice: the run saves where it is, to go on later"),
        (
            "slow_input",
            "WARNING",
            960,
            f"the devices wait for input {EVIL}; see https://hooks.slack.com/services/{SECRET}",
        ),
        ("nonfinite", "ERROR", 1240, "loss or gradients of step 1,240 are not finite"),
        ("finished", "INFO", STEPS, "trained to step 2,400"),
    ]
    facts = {"run": "cifar", "host": "vm-1", "time": "2026-11-29T03:00:00+00:00"}
    return [
        {"event": event, "severity": severity, "step": step, "message": message, **facts}
        for event, severity, step, message in told
    ]


def receipt() -> dict:
    """Of three starts: preempted, killed, finished."""
    ends = [(75, 0, 800), (None, 800, 1560), (0, 1500, STEPS)]
    parts = {"start_up": 9.0, "compiling": 14.0, "steps": 310.0, "recomputed": 8.0, "input_wait": 21.0}
    parts |= {"evaluation": 18.0, "checkpoint_stall": 4.0, "export": 3.0, "other": 1.0, "connecting": 0.01}
    starts = [
        {
            "started": f"2026-11-29T0{index}:00:00+00:00",
            "last_word": f"2026-11-29T0{index}:07:00+00:00",
            "exit_code": code,
            "from_step": begin,
            "reached_step": end,
            "num_devices": 8,
            "waited_secs": 35.0 * bool(index),
            "seconds": parts,
            "notes": [],
        }
        for index, (code, begin, end) in enumerate(ends)
    ]
    seconds = {part: 3 * secs for part, secs in parts.items()} | {"waiting": 70.0}
    wall = sum(seconds.values())
    share = 100 * seconds["steps"] / wall
    return {
        "wall_secs": wall,
        "seconds": seconds,
        "goodput_percent": round(share, 2),
        "goodput_percent_while_running": round(100 * seconds["steps"] / (wall - 70), 2),
        "device_seconds": 8 * wall,
        "notes": [],
        "starts": starts,
    }


def examples(num_classes: int = len(CLASSES)) -> dict:
    """Of examples.json."""
    classes = [CLASSES[index] if index < len(CLASSES) else f"class {index}" for index in range(num_classes)]
    confusion = [
        [
            90 - row if row == column else (row * 7 + column * 3) % 5 * ((row + column) % 3 == 0)
            for column in range(num_classes)
        ]
        for row in range(num_classes)
    ]
    cards = [
        {
            "index": 17 * index,
            "label": classes[index % num_classes],
            "predicted": classes[(index + 3) % num_classes],
            "probability": 0.01 + index / 1000,
            "predicted_probability": 0.97 - index / 100,
            "loss": 4.6 - index / 10,
            "image": png(index),
        }
        for index in range(12)
    ]
    cards[3]["image"] = "https://example.com/tracker.png"
    cards[4] |= {"image": None, "text": "a text with <b>markup</b> in it"}
    cards[5] |= {"image": None, "features": {"age": 41, "income": 0.25, "town": EVIL}}
    return {
        "step": STEPS,
        "split": "test",
        "examples": 1000,
        "total": 10000,
        "task": "classification",
        "classes": classes,
        "confusion": confusion,
        "worst": cards,
    }


def png(seed: int, side: int = 16) -> str:
    """A picture, as examples.json has them."""
    rows = b"".join(
        b"\0" + bytes((16 * x * (1 + seed % 3) + 7 * y * seed) % 256 for x in range(side) for _ in range(3))
        for y in range(side)
    )
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    coded = base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()
    return f"data:image/png;base64,{coded}"


def _start(step: int) -> dict:
    return {
        "time": f"2026-11-29T0{step // 800}:00:00+00:00",
        "step": step,
        "command": ["trainer/main.py", "--dataset=cifar10", "--alert_url=..."],
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "git_dirty": True,
        "python": "3.11.7",
        "packages": {"tensorflow-cpu": "2.20.0", "keras": "3.15.1"},
        "host": "vm-1",
        "devices": "TPU v5e: 8 replicas",
        "data": "cifar10/3.0.2 train: 50000 examples in 8 shards, records 1e0711bc301a2853, none left out",
        "options": {"flags": {"dataset": "cifar10", "model": "cnn"}},
        "platform": {},
        "skipped_records": [],
    }


def _checkpoint(directory: pathlib.Path, serial: int, step: int) -> None:
    directory.mkdir(parents=True)
    marker = Marker(
        serial, step, {"metrics": {"loss": 0.52, "accuracy": 0.89}}, "arrays-1", {}, 12_000_000, "2026-11-29T03:00:00"
    )
    (directory / "COMMIT.json").write_bytes(marker.encode())


def _write(directory: pathlib.Path, name: str, content: dict) -> None:
    (directory / name).write_text(json.dumps(content))


def _lines(directory: pathlib.Path, name: str, lines: list[dict]) -> None:
    (directory / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
