"""What the user sees of an exception that ends a run, and where its traceback is."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from data.errors import DataError
from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ
from tests.gcs import Fault, Gcs, gcs  # noqa: F401
from tests.test_failures import ROWS, error_of
from trainer import diagnose
from trainer.errors import EXIT_CONFIG, EXIT_DEFECT, ConfigError, RetryError

# --- chains, places, files ---


@pytest.mark.parametrize("how", ["from", "during", "hidden"])
def test_what_led_to_an_error_counts_as_python_shows_it(how: str) -> None:
    with pytest.raises(KeyError) as caught:
        try:
            raise error_of("UnavailableError", "Socket closed")
        except Exception as first:
            if how == "during":
                raise KeyError("clean-up")  # noqa: B904
            raise KeyError("clean-up") from (first if how == "from" else None)
    if how == "hidden":
        assert diagnose.find(caught.value) is None
    else:
        assert diagnose.find(caught.value) is ROWS["connection lost"]
        assert "Socket closed" in str(diagnose.explain(caught.value))


def test_errors_of_ours_speak_for_themselves() -> None:
    for error in (ConfigError("do this"), RetryError("Socket closed")):
        assert diagnose.explain(error) is error
    told = diagnose.explain(DataError("record 3 is damaged"))
    assert (str(told), told.exit_code) == ("record 3 is damaged", EXIT_CONFIG)


def test_what_could_not_be_done_comes_first() -> None:
    with pytest.raises(ConfigError, match=r"^Cannot use it: what answers has no TPU") as caught:  # noqa: SIM117
        with diagnose.explained("Cannot use it"):
            raise error_of("NotFoundError", ROWS["no TPU there"].example)
    assert caught.value.__cause__
    with pytest.raises(KeyError), diagnose.explained("Cannot use it"):
        raise KeyError("unknown")


USERS = """
def step(x):
    return x + missing

def calls_back(x):
    return fail(x)
"""


@pytest.fixture
def users(tmp_path: pathlib.Path) -> dict:
    """Functions of a module of the user's, called the way the trainer calls them: from a file of the trainer's."""
    path = tmp_path / "theirs.py"
    path.write_text(USERS)
    names: dict = {}
    exec(compile(USERS, path, "exec"), names)
    caller = compile("def call(function):\n    return function(1)\n", str(ROOT / "trainer" / "replicated.py"), "exec")
    exec(caller, names)
    return names


def test_the_users_own_line_is_named_and_who_is_to_blame(users: dict, tmp_path: pathlib.Path) -> None:
    with pytest.raises(NameError) as caught:
        users["call"](users["step"])
    told = diagnose.explain(caught.value)
    assert str(told) == f"the model's code fails at {tmp_path}/theirs.py:3: NameError: name 'missing' is not defined"
    assert told.exit_code == EXIT_CONFIG

    # Of the trainer's, called from the user's.
    exec(compile("def fail(x):\n    raise KeyError(x)\n", str(ROOT / "trainer" / "plan.py"), "exec"), users)
    with pytest.raises(KeyError) as caught_too:
        users["call"](users["calls_back"])
    told = diagnose.explain(caught_too.value)
    assert told.exit_code == EXIT_DEFECT
    assert "a defect of the trainer" in str(told) and f"(under {tmp_path}/theirs.py:6)" in str(told)


def test_a_model_among_the_trainers_is_a_model(users: dict) -> None:
    path = ROOT / "trainer" / "models" / "mine.py"
    exec(compile(USERS, path, "exec"), users)
    with pytest.raises(NameError) as caught:
        users["call"](users["step"])
    assert f"the model's code fails at {path}:3: NameError" in str(diagnose.explain(caught.value))


def fail_secretly(directory: str) -> tuple[Exception, str]:
    """An unknown failure that tells a secret, and the note on where its traceback is."""
    with pytest.raises(KeyError) as caught, diagnose.kept(directory, lambda text: text.replace("SESAME", "...")):
        raise KeyError("SESAME")
    (note,) = caught.value.__notes__
    return caught.value, note


def test_the_traceback_is_in_the_model_dir_without_secrets(tmp_path: pathlib.Path) -> None:
    _, note = fail_secretly(str(tmp_path))
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"failure-\d{8}T\d{6}\.\d{6}Z\.txt", path.name)
    assert note == f"(the traceback is in {path})"
    text = path.read_text()
    assert text.startswith("Traceback (most recent call last):") and "KeyError: '...'" in text and "SESAME" not in text


def test_without_a_directory_it_is_elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for directory in (f"{tmp_path}/none", "gs://not-asked-for"):
        assert f"(the traceback is in {tmp_path}/failure-" in fail_secretly(directory)[1]
    assert not (tmp_path / "none").exists()
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path}/none")
    assert fail_secretly(f"{tmp_path}/none")[1] == "(the traceback could not be written)"


def test_errors_of_ours_need_no_traceback(tmp_path: pathlib.Path, users: dict) -> None:
    exec(compile(USERS.replace("def step", "def builtin"), str(ROOT / "trainer" / "models" / "cnn.py"), "exec"), users)
    with pytest.raises(ConfigError) as caught, diagnose.kept(str(tmp_path), str):
        try:
            users["call"](users["builtin"])
        except NameError as error:
            raise ConfigError("the model cnn cannot be built") from error
    assert not hasattr(caught.value, "__notes__") and not list(tmp_path.glob("failure-*"))
    with pytest.raises(ConfigError) as caught, diagnose.kept(str(tmp_path / "run"), str):
        raise ConfigError("do this") from KeyError("x")
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(ConfigError) as caught, diagnose.kept(str(tmp_path), str):
        try:
            users["call"](users["step"])
        except NameError as error:
            raise ConfigError("the model cannot be built") from error
    assert "the traceback is in" in caught.value.__notes__[0], "their own code is for them to look through"


def test_texts_that_no_file_and_no_line_can_hold(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError) as caught, diagnose.kept(str(tmp_path), str):
        raise ValueError("\ud800 is not of UTF-8")
    (path,) = tmp_path.iterdir()
    assert caught.value.__notes__ == [f"(the traceback is in {path})"]
    assert r"ValueError: \ud800 is not of UTF-8" in path.read_text()


class SpeechlessError(Exception):
    def __str__(self) -> str:
        return self.missing


def test_an_error_that_cannot_say_what_it_is_ends_the_run_like_others() -> None:
    told = diagnose.explain(SpeechlessError())
    assert str(told).endswith("SpeechlessError: its message fails with AttributeError")


def test_megabytes_are_told_in_a_line_and_in_no_time() -> None:
    """The patterns of the table took hours for them."""
    code = (
        "from trainer import diagnose\n"
        "for text in 'x', ' ', '\\n', 'indices[0] = 3 ', '{{function_node ', '  File \"x\\n':\n"
        "    print(len(str(diagnose.explain(RuntimeError(text * 1_000_000)))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    lengths = [int(line) for line in done.stdout.splitlines()]
    assert len(lengths) == 6 and max(lengths) < 1000, done.stderr


def test_of_a_python_function_in_a_graph_its_error_is_told() -> None:
    """As TensorFlow words it, with Python's traceback in the text."""
    text = (
        "{{function_node __wrapped__EagerPyFunc}} KeyError: 'heartbeat'\nTraceback (most recent call last):\n\n"
        '  File "/site-packages/tensorflow/python/ops/script_ops.py", line 273, in __call__\n'
        "    return func(device, token, args)\n           ^^^^^^^^^^^^^^^^^^^^^^^^^\n\n"
        '  File "/home/me/net.py", line 9, in beat\n    return row["heartbeat"]\n           ~~~^^^^^^^^^^^^^\n\n'
        "KeyError: 'heartbeat'\n\n\n\t [[{{node EagerPyFunc}}]]"
    )
    told = diagnose.explain(error_of("UnknownError", text))
    said = "UnknownError: KeyError: 'heartbeat' KeyError: 'heartbeat'"
    assert str(told) == f"the model's code fails at /home/me/net.py:9: {said}"


GCS = """
import sys
import tensorflow as tf
from trainer import diagnose, logs
logs.configure("json", redact=str)
try:
    with tf.io.gfile.GFile(sys.argv[1] + "denied", "w") as file:
        file.write("x")
except tf.errors.OpError as error:
    print(diagnose.find(error).name)
try:
    with diagnose.kept(sys.argv[1], str):
        raise KeyError("unknown")
except KeyError as error:
    sys.exit(diagnose.report(error, str))
"""


@pytest.mark.slow
def test_a_bucket_that_denies_and_one_that_keeps(gcs: Gcs) -> None:  # noqa: F811
    """Error Reporting reads stacks from the log, so a defect has its own there too."""
    environ = clean_environ() | gcs.environ() | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    # As Google words it: googlecolab/colabtools#1177.
    words = "somebody@example.iam.gserviceaccount.com does not have storage.objects.create access to the bucket."
    gcs.set_faults(Fault(code=403, times=None, method="POST|PUT", path="denied", message=words))
    command = [sys.executable, "-c", GCS, f"{gcs.url}/run/"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == EXIT_DEFECT, done.stderr
    assert done.stdout == "bucket denies access\n"
    (name,) = [name for name in gcs.objects() if name.startswith("run/failure-")]
    assert b"KeyError: 'unknown'" in gcs.read(name)
    (entry,) = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert entry["message"].endswith(f"KeyError: 'unknown' (the traceback is in {gcs.url}/{name})")
    assert (entry["severity"], entry["exit_code"]) == ("CRITICAL", EXIT_DEFECT)
    assert entry["stack_trace"].startswith("Traceback (most recent call last):")


# --- whole runs ---

MODEL = """
import dataclasses

import keras
import tensorflow as tf

from trainer import console


@dataclasses.dataclass(frozen=True)
class Options:
    fault: str = ""


class Faulty(keras.layers.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def call(self, x):
        if self.fault == "eig":
            values = tf.linalg.eigvals(tf.matmul(x, x, transpose_a=True))
            return x + tf.math.real(values)
        return x


def build(options, spec):
    if options.fault == "defect":  # of the trainer itself, as far as anybody can tell
        console.start_up = lambda **parts: console.table(None)
    image = keras.Input(spec.inputs.shape, dtype=spec.inputs.dtype)
    x = keras.layers.Dense(8)(keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(image)))
    return Lazy(options.fault, image, x, spec.num_classes)


class Lazy(keras.Model):
    def __init__(self, fault, image, x, classes):
        super().__init__()
        self.body = keras.Model(image, x)
        self.faulty = Faulty(fault)
        self.head = keras.layers.Dense(classes)
        self.fault = fault

    def call(self, image):
        return self.head(self.faulty(self.body(image)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if self.fault == "type":
            return y_pred + {}
        return super().compute_loss(x, y, y_pred, sample_weight, training)
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with modules of a user's own, to start from."""
    folder = tmp_path_factory.mktemp("user") / "theirs"
    folder.mkdir()
    (folder / "net.py").write_text(MODEL)
    (folder / "typo.py").write_text("def build(options, spec):\n    return ]\n")
    return folder.parent


def _line(theirs: pathlib.Path, code: str) -> str:
    lines = (theirs / "theirs/net.py").read_text().splitlines()
    return f"{theirs}/theirs/net.py:{next(n for n, line in enumerate(lines, 1) if code in line)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "flags", "code", "said", "culprit"),
    [
        ("type", [], 78, "the model's code fails at", "y_pred + {}"),
        ("eig", ["--xla=on"], 78, "cannot compile an operation of the model", "tf.linalg.eigvals"),
        ("defect", [], 1, "a defect of the trainer, or a failure that it does not know", ""),
    ],
)
def test_a_run_that_fails_says_one_line_and_keeps_the_traceback(
    trainer: Trainer,
    theirs: pathlib.Path,
    tmp_path: pathlib.Path,
    fault: str,
    flags: list,
    code: int,
    said: str,
    culprit: str,
) -> None:
    flags = [*flags, f"--model_dir={tmp_path}", "--model=theirs.net", f"--model_options=fault='{fault}'"]
    done = trainer.run(*flags, "--train_steps=4", code=code, cwd=theirs)
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("trainer: ")]
    assert said in message and "Traceback" not in done.stderr
    if culprit:
        assert _line(theirs, culprit) in message
    (path,) = tmp_path.glob("failure-*.txt")
    assert message.endswith(f"(the traceback is in {path})")
    assert path.read_text().startswith("Traceback (most recent call last):")
    if fault == "type":  # is found before the run has begun
        return
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", code)
    assert message == f"trainer: {status['reason']} (the traceback is in {path})"


@pytest.mark.slow
def test_a_model_that_ends_the_process_has_not_finished_the_run(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    flags = ["--model=tests.models_that_fail", "--model_options=how='sys.exit(0)'", f"--model_dir={tmp_path}"]
    done = trainer.run(*flags, code=78)
    assert done.stderr.startswith("trainer: the model's code fails at ") and "SystemExit: 0 (the" in done.stderr


@pytest.mark.slow
def test_a_module_that_is_no_python(trainer: Trainer, theirs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    done = trainer.run(f"--model_dir={tmp_path}/run", "--model=theirs.typo", code=78, cwd=theirs, environ=environ)
    (message,) = done.stderr.splitlines()
    assert message.startswith("trainer: a module is not valid Python. Mend that line.")
    assert f"It comes about at {theirs}/theirs/typo.py:2" in message
    (path,) = tmp_path.iterdir()
    assert message.endswith(f"(the traceback is in {path})"), "not in a model_dir that is not there"
