"""What a run says: plain lines, JSON lines as Cloud Logging reads them, from every source, without secrets."""

import datetime
import json
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import logs

LABELS = "logging.googleapis.com/labels"
TABLE = "loss      0.5\naccuracy  0.75"

_log = logging.getLogger("trainer.test")


def _redact(text: str) -> str:
    return text.replace("SECRET", "...")


@pytest.fixture
def say() -> Iterator[Callable]:
    """`logs.configure`; what it changed in this process is undone."""
    root, ours = logging.getLogger(), logging.getLogger("trainer")
    before = list(root.handlers), ours.level, sys.excepthook, threading.excepthook
    yield lambda format, **options: logs.configure(format, redact=_redact, **options)
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    ours.setLevel(before[1])
    sys.excepthook, threading.excepthook = before[2:]


def _entries(text: str) -> list[dict]:
    def refuse(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def _run(script: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=clean_environ() | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=GUARD_SECS,
    )
    assert done.returncode == code, done.stderr
    return done


def test_text_is_plain_on_stdout_and_marked_on_stderr(say: Callable, capsys: pytest.CaptureFixture) -> None:
    say("text")
    _log.info(TABLE)
    _log.warning("the input is slow")
    _log.error("a save failed")
    logs.report_failure("nothing to read.\nReceived: ''", 78)
    out, err = capsys.readouterr()
    assert out == TABLE + "\n"
    assert err == (
        "trainer: warning: the input is slow\ntrainer: error: a save failed\ntrainer: nothing to read.\nReceived: ''\n"
    )


def test_json_is_one_entry_a_line_with_severity_and_fields(say: Callable, capsys: pytest.CaptureFixture) -> None:
    say("json", worker_index=0, num_workers=2)
    _log.info(TABLE, extra={"fields": {"step": 150, "train/loss": 0.5, "severity": "a field may not pose as one"}})
    _log.warning("100%% of %s", "this")
    _log.error("bad")
    _log.critical("worse")
    logs.report_failure("nothing to read", 78)
    out, err = capsys.readouterr()
    (first,) = _entries(out)
    assert first["message"] == TABLE
    assert (first["severity"], first["step"], first["train/loss"]) == ("INFO", 150, 0.5)
    assert first["worker_index"] == 0
    assert first[LABELS] == {"worker_index": "0", "num_workers": "2"}
    assert first["time"].endswith("Z")
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(first["time"])
    assert abs(age) < datetime.timedelta(hours=1)
    rest = _entries(err)
    assert [entry["severity"] for entry in rest] == ["WARNING", "ERROR", "CRITICAL", "ERROR"]
    assert rest[0]["message"] == "100% of this"
    assert (rest[-1]["message"], rest[-1]["exit_code"]) == ("nothing to read", 78)


def test_json_holds_values_that_json_does_not_know(say: Callable, capsys: pytest.CaptureFixture) -> None:
    say("json")
    fields = {
        "nan": math.nan,
        "up": math.inf,
        "down": np.float32(-math.inf),
        "numpy": np.int64(3),
        "nested": {"list": [math.nan, 1.5, None, True]},
        "object": range(3),
    }
    _log.info("values", extra={"fields": fields})
    (entry,) = _entries(capsys.readouterr().out)
    assert {name: entry[name] for name in fields} == {
        "nan": "NaN",
        "up": "Infinity",
        "down": "-Infinity",
        "numpy": 3,
        "nested": {"list": ["NaN", 1.5, None, True]},
        "object": "range(0, 3)",
    }


@pytest.mark.parametrize("format", logs.FORMATS)
def test_workers_but_the_chief_say_what_is_wrong_only(
    say: Callable, capsys: pytest.CaptureFixture, format: str
) -> None:
    say(format, worker_index=3, num_workers=4)
    _log.info("step 1")
    _log.warning("slow")
    out, err = capsys.readouterr()
    assert not out
    if format == "text":
        assert err == "trainer: worker 3: warning: slow\n"
    else:
        (entry,) = _entries(err)
        assert (entry["message"], entry["worker_index"], entry[LABELS]["worker_index"]) == ("slow", 3, "3")


@pytest.mark.parametrize("format", logs.FORMATS)
def test_no_secret_passes(say: Callable, capsys: pytest.CaptureFixture, format: str) -> None:
    say(format)
    _log.info("to SECRET", extra={"fields": {"url": "SECRET", "list": ["SECRET"], "inner": {"SECRET": "SECRET"}}})
    _log.warning("to %s", "SECRET")
    logs.report_failure("SECRET", 78)
    try:
        raise ValueError("SECRET")
    except ValueError:
        _log.exception("failed")
    out, err = capsys.readouterr()
    assert "..." in out
    assert "ValueError: ..." in err
    assert "SECRET" not in out + err


def test_quiet_leaves_results_and_warnings(say: Callable, capsys: pytest.CaptureFixture) -> None:
    say("text", quiet=True)
    _log.info("step 1")
    _log.log(logs.RESULT, TABLE)
    _log.warning("odd")
    assert capsys.readouterr() == (f"{TABLE}\n", "trainer: warning: odd\n")
    say("json", quiet=True)
    _log.log(logs.RESULT, TABLE)
    assert _entries(capsys.readouterr().out)[0]["severity"] == "INFO"
    say("text", quiet=True, worker_index=1)
    _log.log(logs.RESULT, TABLE)
    assert capsys.readouterr().out == ""


def test_a_second_call_replaces_the_first(say: Callable, capsys: pytest.CaptureFixture) -> None:
    say("text")
    say("json")
    _log.info("once")
    assert len(_entries(capsys.readouterr().out)) == 1


LIBRARIES = """
import logging, warnings
import absl.logging, tensorflow as tf
tf.get_logger()  # brings a handler of its own, since nothing is configured
from trainer import logs
logs.configure("json", redact=str)
noisy = logging.getLogger("noisy")
noisy.setLevel(logging.DEBUG)
for log in (noisy, tf.get_logger(), logging.getLogger("data.records")):
    log.info("a note for the developers of a library")
    log.warning("wrong")
absl.logging.warning("wrong")
warnings.warn("wrong", RuntimeWarning)
"""


def test_libraries_speak_the_same_way_when_something_is_wrong() -> None:
    done = _run(LIBRARIES)
    assert not done.stdout
    entries = _entries(done.stderr)
    assert [(entry["logger"], entry["severity"]) for entry in entries] == [
        (name, "WARNING") for name in ("noisy", "tensorflow", "data.records", "absl", "py.warnings")
    ]
    assert all("wrong" in entry["message"] for entry in entries)


DEFECT = """
import sys, threading
from trainer import logs
logs.configure(sys.argv[1], redact=lambda text: text.replace("SECRET", "..."))
def fail(): raise RuntimeError("first\\nsecond SECRET")
thread = threading.Thread(target=fail, name="saver")
thread.start()
thread.join()
fail()
"""


@pytest.mark.parametrize("format", logs.FORMATS)
def test_a_defect_is_one_entry_with_its_stack(format: str) -> None:
    done = _run(DEFECT, format, code=1)
    assert "SECRET" not in done.stderr
    if format == "text":
        assert done.stderr.count("Traceback (most recent call last):") == 2
        assert done.stderr.rstrip().endswith("RuntimeError: first\nsecond ...")
        return
    in_thread, last = _entries(done.stderr)
    assert (in_thread["severity"], last["severity"]) == ("ERROR", "CRITICAL")
    assert "saver" in in_thread["message"]
    for entry in (in_thread, last):
        assert entry["stack_trace"].startswith("Traceback (most recent call last):")
        assert entry["stack_trace"].endswith("RuntimeError: first\nsecond ...")


def test_it_needs_no_tensorflow() -> None:
    _run("import sys, trainer.logs; sys.exit('tensorflow' in sys.modules)")


FULL_DISK = """
import logging, os, sys
from trainer import logs
logs.configure("text", redact=str)
log = logging.getLogger("trainer")
sys.stdout = open("/dev/full", "w")
log.info("lost")
log.info("lost")
log.warning("and on")
os._exit(0)  # closing the file would fail again
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is of Linux")
def test_a_full_disk_under_the_log_does_not_end_the_run() -> None:
    assert _run(FULL_DISK).stderr.splitlines() == [
        "trainer: warning: the log cannot be written: [Errno 28] No space left on device",
        "trainer: warning: and on",
    ]


@pytest.mark.parametrize(
    ("argv", "format"),
    [
        ([], "text"),
        (["--log_format=json"], "json"),
        (["-log_format", "json", "--seed=1"], "json"),
        (["--log_format=json", "--log_format=text"], "text"),
        (["--log_format=jsno"], "text"),
        (["--log_format"], "text"),
        (["--model=log_format"], "text"),
    ],
)
def test_the_format_is_known_before_anything_is_checked(argv: list[str], format: str) -> None:
    assert logs.wanted_format(["main.py", *argv]) == format


@pytest.mark.parametrize("format", logs.FORMATS)
def test_last_words_need_no_lock_of_logging(format: str) -> None:
    script = """
import logging, sys
from trainer import logs
logs.configure(sys.argv[1], redact=lambda text: text.replace("SECRET", "..."))
logging.getLogger().handlers[0].acquire()  # as a thread that is stuck
sys.stderr = None
import threading
thread = threading.Thread(target=lambda: logs.write_last_words("the end SECRET", 75, stack="line 1\\nline 2 SECRET"))
thread.start()
thread.join()
"""
    err = _run(script, format).stderr
    if format == "text":
        assert err == "trainer: the end ...\nline 1\nline 2 ...\n"
    else:
        (entry,) = _entries(err)
        assert (entry["severity"], entry["message"], entry["exit_code"]) == ("ERROR", "the end ...", 75)
        assert entry["stack_trace"] == "line 1\nline 2 ..."
