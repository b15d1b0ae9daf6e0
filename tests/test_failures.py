"""Known failures: each row of the table on the text it was seen with, and many on the failure itself.

What is told before it comes to the table has its own tests: TPUs by name and address and missing workers in
test_cluster.py, a worker killed in the middle of a run and buckets that fail in test_survives.py, damaged records in
test_corrupt_records.py.
"""

import ast
import builtins
import importlib.util
import json
import re
import subprocess
import sys

import pytest

from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import diagnose
from trainer.config import FIELDS
from trainer.errors import EXIT_CONFIG, EXIT_DEFECT, EXIT_RETRY, ConfigError, RetryError
from trainer.failures import KNOWN, Failure, jax
from trainer.flags import help_text

ROWS = {row.name: row for row in KNOWN}


def error_of(kind: str, text: str) -> Exception:
    """As TensorFlow would raise it: its types are known by their names."""
    if isinstance(known := getattr(builtins, kind, None), type):
        return known(text)
    tensorflows = type("OpError", (Exception,), {})
    return type(kind, (tensorflows,), {})(text)


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
        # Words of the user's own code, which only mention what a row looks for.
        ("UnknownError", "KeyError: 'heartbeat'"),
        ("InvalidArgumentError", "assertion failed: [OOM when allocating tensor]"),
        ("ValueError", "End of sequence token is missing"),
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
            '/dev/accel0" to figure out which process is using the TPU. Not attempting to load '
            "libtpu.so in this process.",
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
            "scheme '[local]' not implemented (file: '/gdrive/My Drive/plant-pathology-2020-fgvc7/images/"
            "Train_187.jpg')\n\t [[{{node ReadFile}}]]",
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
        (
            "AssertionError",
            "batch_size must be divisible by the number of TPU cores in use (6 vs 8)",
            "batch and replicas",
        ),
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
    20: [
        (
            "MemoryError",
            "Unable to allocate 8.00 TiB for an array with shape (1048576, 1048576) and data type float64",
            "out of host memory",
        )
    ],
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
            "E1000: CompileTimeHbmOom ... (24.48G) exceeds available HBM (15.75G)",
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
    assert len(provoked) > (len(KNOWN) - len(jax.FAILURES)) // 2  # those of JAX: below
    for name, each in provoked.items():
        assert each["exit_code"] == (EXIT_RETRY if ROWS[name].retryable else EXIT_CONFIG)
        assert re.search(r"(TensorFlow|Keras|NumPy|Python) says: .", each["told"]), each["told"]
        assert "\n" not in each["told"] and "\x1b" not in each["told"]


@pytest.mark.slow
def test_failures_of_jax_that_really_happen_are_known() -> None:
    command = [sys.executable, "-m", "tests.provoked_jax_failures"]
    environ = clean_environ() | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 0, done.stderr
    for name, found, told, exit_code in map(json.loads, done.stdout.splitlines()):
        assert (found, exit_code) == (name, EXIT_CONFIG), told
        assert "It comes about at" in told and "provoked_jax_failures.py" in told


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
