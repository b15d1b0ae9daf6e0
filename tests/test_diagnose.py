"""Known failures: each row on the text it was seen with, many on the failure itself, and what the user sees at the end.

What is told before it comes to the table has its own tests: TPUs by name and address and missing workers in
test_cluster.py, a worker killed in the middle of a run and buckets that fail in test_survives.py, damaged records in
test_corrupt_records.py.
"""

import ast
import builtins
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

from data.errors import DataError
from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ
from tests.gcs import Fault, Gcs, gcs  # noqa: F401
from trainer import diagnose
from trainer.config import FIELDS
from trainer.errors import EXIT_CONFIG, EXIT_DEFECT, EXIT_RETRY, ConfigError, RetryError
from trainer.failures import KNOWN, Failure
from trainer.flags import help_text

ROWS = {row.name: row for row in KNOWN}


def error_of(kind: str, text: str) -> Exception:
    """As TensorFlow would raise it: its types are known by their names."""
    if isinstance(known := getattr(builtins, kind, None), type):
        return known(text)
    tensorflows = type("OpError", (Exception,), {})
    return type(kind, (tensorflows,), {})(text)


# --- the table ---


@pytest.mark.parametrize("row", KNOWN, ids=list(ROWS))
def test_a_row_is_found_by_its_text_and_says_what_to_do(row: Failure) -> None:
    # Of any of TensorFlow's types, and of any type at all: those that the last rows of the table look for too.
    kinds = [*row.kinds, *(["UnavailableError", "InternalError"] if set(row.kinds) <= {"OpError"} else [])]
    for kind in kinds:
        error = error_of(kind, row.example)
        assert diagnose.find(error) is row
        told = diagnose.explain(error)
        assert type(told) is (RetryError if row.retryable else ConfigError)
        assert told.exit_code == (EXIT_RETRY if row.retryable else EXIT_CONFIG)
        assert str(told).startswith(f"{row.cause}. {row.remedy}. ")
        assert "\n" not in str(told)
    assert row.source and not row.cause.endswith(".") and not row.remedy.endswith(".")


def test_names_are_unique() -> None:
    assert len(ROWS) == len(KNOWN)


def test_remedies_name_what_there_is() -> None:
    for row in KNOWN:
        for name, _, value in re.findall(r"--(\w+)(=([\w.]+))?", f"{row.cause} {row.remedy}"):
            assert f"--{name}" in help_text() and name in FIELDS, f"{row.name}: --{name}"
            choices = FIELDS[name].metadata["choices"]
            assert not value or not choices or value in choices, f"{row.name}: --{name}={value}"
        for module in re.findall(r"python -m ([\w.]+)", row.remedy):
            assert importlib.util.find_spec(module), f"{row.name}: {module}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("IndexError", "list index out of range"),
        ("ValueError", "batch_size must be positive"),
        ("ValueError", "The number of channels (3) must be divisible by 2"),
        ("TypeError", "unsupported operand type(s) for +: 'int' and 'str'"),
        ("RuntimeError", "dictionary changed size during iteration"),
        ("AssertionError", ""),
        ("AttributeError", "module 'keras' has no attribute 'TPU_NAME'"),
        ("InternalError", "RET_CHECK failure (service.cc:12) shape != nullptr"),
        ("InvalidArgumentError", "Incompatible shapes: [8,3] vs. [8,4]"),
        ("NotFoundError", "/data/x; No such file or directory"),
        ("ResourceExhaustedError", "/model/part; No space left on device"),
        ("CancelledError", "Function was cancelled before it was started"),
    ],
)
def test_what_it_does_not_know_is_left_alone(kind: str, text: str) -> None:
    error = error_of(kind, text)
    assert diagnose.find(error) is None
    told = diagnose.explain(error)
    assert told.exit_code == EXIT_DEFECT
    assert "a defect of the trainer, or a failure that it does not know" in str(told)
    assert f"{kind}: {text}".rstrip(": ") in str(told)


# What people saw, by the rows of shared/facts-pains.md (repo#number there), and the row of our table that it is.
PAINS = {
    1: [
        (
            "NotFoundError",
            "Graph execution error:\n\nDetected at node StatefulPartitionedCall defined at (most recent call last):\n"
            '  File "<frozen runpy>", line 198, in _run_module_as_main\n\ncould not find registered transfer manager '
            "for platform Host -- check target linkage\n\t [[{{node StatefulPartitionedCall}}]] "
            "[Op:__inference_multi_step_on_iterator_33145]",
            "XLA for the host of a TPU",
        ),
        (
            "NotFoundError",
            "could not find registered transfer manager for platform Host -- check target linkage "
            "[Op:__inference__jit_compiled_convolution_op_26169]",
            "XLA for the host of a TPU",
        ),
    ],
    2: [
        (
            "InvalidArgumentError",
            "NodeDef expected inputs 'string' do not match 0 inputs specified; Op<name=_Send; signature=tensor:T -> ; "
            "attr=T:type; attr=tensor_name:string; \nattr=send_device:string; attr=send_device_incarnation:int; "
            "attr=recv_device:string; attr=client_terminated:bool,default=false; is_stateful=true>; NodeDef: "
            "{{node _Send}}",
            "versions of client and worker differ",
        )
    ],
    3: [
        (
            "InvalidArgumentError",
            "No OpKernel was registered to support Op 'ConfigureDistributedTPU' used by {{node "
            'ConfigureDistributedTPU}} with these attrs: [tpu_embedding_config=""]\nRegistered devices: [CPU, XLA_CPU]',
            "TensorFlow without TPU support",
        ),
        (
            "AbortedError",
            'libtpu.so already in use by another process probably  owned by another user. Run "$ sudo lsof -w '
            '/dev/accel0" to figure out which process is using the TPU. Not attempting to load libtpu.so here.',
            "TPU in use",
        ),
        ("AbortedError", "The TPU is already in use by process with pid 4711. Not attempting to load", "TPU in use"),
    ],
    4: [
        ("ValueError", "Please provide a TPU Name to connect to.", "no TPU named"),
        ("RuntimeError", "TPU cores on each host is not same. This should not happen!. ", "part of a pod slice"),
        ("RuntimeError", "Collective ops must be configured at program startup", "TensorFlow in use too early"),
    ],
    5: [
        (
            "UnimplementedError",
            "From /job:worker/replica:0/task:0:\n{{function_node __inference_Dataset_map_decode_image_22}} File system "
            "scheme '[local]' not implemented (file: '/gdrive/My Drive/images/187.jpg')\n\t [[{{node ReadFile}}]]",
            "local path on a remote worker",
        )
    ],
    6: [
        (
            "PermissionDeniedError",
            'Error executing an HTTP request: HTTP response code 403 with body \'{\n "error": {\n  "code": 403,\n  '
            '"message": "service-495559152420@cloud-tpu.iam.gserviceaccount.com does not have storage.objects.create '
            'access to bucketname/train/events.out.tfevents.1587750594.n-205be46b-w-0.126.1385.v2.",\n',
            "bucket denies access",
        )
    ],
    7: "tests/checkpoints/test_store.py::test_on_a_bucket",
    8: "tests/checkpoints/test_store.py::test_a_snapshot_that_shares_memory_keeps_its_moment",
    9: [
        (
            "AssertionError",
            "Found 1 Python objects that were not bound to checkpointed values, likely due to changes in the Python "
            "program.",
            "checkpoint does not fit",
        )
    ],
    10: [
        ("UnavailableError", "Socket closed", "connection lost"),
        (
            "UnavailableError",
            "2 root error(s) found.\n  (0) Unavailable: Socket closed\n  (1) Unavailable: Unable to find a context_id "
            "matching the specified one (12465293436922014039). Perhaps the worker was restarted, or the context was "
            "GC'd?\n0 successful operations.\n0 derived errors ignored.",
            "worker was restarted",
        ),
        ("InternalError", 'RPC failed with status = "Unavailable: Socket closed"', "process at the other end gone"),
    ],
    11: "tests/test_resume.py::test_killed_run_ends_with_the_same_bits",
    12: [
        (
            "ValueError",
            "Trying to create optimizer slot variable under the scope for tf.distribute.Strategy "
            "(<tensorflow.python.distribute.one_device_strategy.OneDeviceStrategy object at 0x15b49bed0>), which is "
            "different from the scope used for the original variable",
            "made outside of the strategy",
        ),
        (
            "ValueError",
            "You called `set_weights(weights)` on optimizer Adam with a  weight list of length 19, but the optimizer "
            "was expecting 0 weights",
            "checkpoint does not fit",
        ),
    ],
    13: [
        (
            "UnimplementedError",
            "{{function_node __inference_distributed_function_299068}} Compilation failure: Dynamic concatenation is "
            "not supported yet: %reshape.3993 = s32[832]{0} reshape(s32[2,416]{1,0} %reshape.621), metadata="
            '{op_type="Reshape" op_name="Reshape_1636"}\n\tTPU compilation failed\n\t [[{{node '
            "tpu_compile_succeeded_assert/_14468581000393706631/_10}}]].",
            "shape not known to XLA",
        )
    ],
    14: [
        ("AssertionError", "batch_size must be divisible by the number of TPU cores in use", "batch and replicas"),
        ("ValueError", "train batch size 6 must be divisible by number of replicas 8", "batch and replicas"),
    ],
    15: "tests/test_replicated.py::test_metrics_and_weights_are_those_of_one_replica",
    16: "tests/test_plan.py::test_every_interval_lands_on_its_exact_step",
    17: "tests/test_replicated.py::test_loop_length_changes_nothing",
    18: "tests/callbacks/test_slow_input.py::test_it_is_told_once_and_again_after_it_was_better",
    19: [
        (
            "InvalidArgumentError",
            "There aren't enough elements in this dataset for each shard to have at least one element (# elems = 1, "
            "# shards = 4). If you are using datasets with distribution strategy, considering setting the auto "
            "sharding policy to either DATA or OFF",
            "fewer files than workers",
        )
    ],
    # A process that the kernel kills says nothing: what comes before that.
    20: [("MemoryError", "Unable to allocate 8.00 TiB for an array with shape (1048576,)", "out of host memory")],
    21: [
        ("DataLossError", "corrupted record at 3289898", "damaged record"),
        (
            "InvalidArgumentError",
            "Feature: labels (data type: int64) is required but could not be found.\n\t [[{{node "
            "ParseSingleExample/ParseExample/ParseExampleV2}}]] [Op:IteratorGetNext]",
            "records of another schema",
        ),
    ],
    22: [
        (
            "ResourceExhaustedError",
            "Compilation failure: Ran out of memory in memory space hbm. Used 8.38G of 8.00G hbm. Exceeded hbm "
            "capacity by 385.25M.\n\nTotal hbm usage >= 8.88G:\n    reserved        530.00M",
            "out of HBM",
        ),
        (
            "RuntimeError",
            "E1000: CompileTimeHbmOom: the program needs (24.48G) exceeds available HBM (15.75G)",
            "out of HBM",
        ),
    ],
    23: [
        (
            "InvalidArgumentError",
            "Detected unsupported operations when trying to compile graph while_body_12659_const_0[] on XLA_TPU_JIT: "
            "RaggedRange (No registered 'RaggedRange' OpKernel for XLA_TPU_JIT devices compatible with node {{node "
            "while/RaggedRange}}){{node while/RaggedRange}}",
            "operation XLA cannot compile",
        )
    ],
    24: "tests/test_nonfinite.py::test_the_layer_that_makes_it_is_named",
    25: [
        (
            "UserWarning",
            "Your input ran out of data; interrupting training. Make sure that your dataset or generator can generate "
            "at least `steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function",
            "input ended",
        ),
        ("OutOfRangeError", "End of sequence\n\t [[{{node IteratorGetNext_2}}]]", "input ended"),
    ],
}


@pytest.mark.parametrize("number", PAINS)
def test_what_hurt_people(number: int) -> None:
    """By the text they saw; where there was none, a test of its own holds that it does not happen here."""
    if isinstance(held_by := PAINS[number], str):
        path, _, function = held_by.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        return
    for kind, text, name in held_by:
        known = diagnose.find(error_of(kind, text))
        assert known and known.name == name


def test_all_that_hurt_people_is_there() -> None:
    assert list(PAINS) == list(range(1, 26))


# --- the failures themselves ---


@pytest.fixture(scope="module")
def provoked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What became of each of `tests/provoked_failures.py`, by the row that it should be."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.provoked_failures", str(tmp_path_factory.mktemp("provoked"))],
        cwd=ROOT,
        env=clean_environ() | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=GUARD_SECS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["name"]: each for each in said}


@pytest.mark.slow
def test_failures_that_really_happen_are_known(provoked: dict[str, dict]) -> None:
    assert {name: each["found"] for name, each in provoked.items()} == {name: name for name in provoked}
    assert len(provoked) > len(KNOWN) // 2
    for name, each in provoked.items():
        assert each["exit_code"] == (EXIT_RETRY if ROWS[name].retryable else EXIT_CONFIG)
        assert re.search(r"(TensorFlow|Keras|NumPy|Python) says: .", each["told"]), each["told"]
        assert "\n" not in each["told"] and "\x1b" not in each["told"]


@pytest.mark.slow
def test_a_layer_of_the_users_own_is_named_by_its_line(provoked: dict[str, dict]) -> None:
    lines = (ROOT / "tests/provoked_failures.py").read_text().splitlines()
    expected = {
        "operation XLA cannot compile": "tf.linalg.eigvals",
        "shape not known to XLA": "tf.sequence_mask",
        "Python condition on a tensor": "if x > 0",
        "variable made while running": "tf.Variable(1.0)",
    }
    for name, code in expected.items():
        path, _, number = provoked[name]["place"].rpartition(":")
        assert path.endswith("tests/provoked_failures.py")
        assert code in lines[int(number) - 1]
        assert f"It comes about at {provoked[name]['place']}" in provoked[name]["told"]


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
def test_a_module_that_is_no_python(trainer: Trainer, theirs: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    done = trainer.run(f"--model_dir={tmp_path}/run", "--model=theirs.typo", code=78, cwd=theirs, environ=environ)
    (message,) = done.stderr.splitlines()
    assert message.startswith("trainer: a module is not valid Python. Mend that line.")
    assert f"It comes about at {theirs}/theirs/typo.py:2" in message
    (path,) = tmp_path.iterdir()
    assert message.endswith(f"(the traceback is in {path})"), "not in a model_dir that is not there"
