"""Which line of a traceback is the user's."""

import pathlib
import sysconfig

import keras
import tensorflow as tf

import trainer
from trainer import places

OURS = pathlib.Path(trainer.__file__).parent
KERAS = pathlib.Path(keras.__file__).parent
MINE = __file__


def test_the_innermost_line_that_is_nobody_elses() -> None:
    lines = [("/opt/job/start.py", 1), (f"{OURS}/main.py", 40), (MINE, 3), (f"{KERAS}/src/layers/layer.py", 1000)]
    found = places.innermost(lines)
    assert (found.path, found.line, found.is_last) == (MINE, 3, True)
    assert places.innermost([*lines, (f"{OURS}/replicated.py", 7)]).is_last is False


def test_what_called_the_trainer_does_not_count() -> None:
    assert places.innermost([(MINE, 1), (f"{OURS}/main.py", 40), (f"{OURS}/training.py", 9)]) is None


def test_models_of_the_trainer_count_as_the_users() -> None:
    assert places.innermost([(f"{OURS}/main.py", 1), (f"{OURS}/models/cnn.py", 30)]).path == f"{OURS}/models/cnn.py"
    assert places.innermost([(f"{OURS}/main.py", 1), (f"{OURS}/models/_inputs.py", 30)]) is None


def test_an_installed_model_counts_and_libraries_do_not() -> None:
    site = sysconfig.get_path("purelib")
    assert places.innermost([(f"{OURS}/main.py", 1), (f"{site}/mycompany/model.py", 5)]).line == 5
    standard = f"{sysconfig.get_path('stdlib')}/functools.py"
    generated = "/tmp/__autograph_generated_file0.py"
    for library in (f"{site}/tensorflow/python/ops.py", f"{site}/numpy/core.py", standard, "<string>", generated):
        assert places.innermost([(f"{OURS}/main.py", 1), (library, 5)]) is None, library


def test_paths_without_what_they_begin_with_are_made_whole() -> None:
    """TensorFlow leaves out the common beginning of the paths of a graph."""
    cut = f"{OURS.parent}/"
    text = f'created at:\n  File "trainer/replicated.py", line 7, in step\n  File "{MINE.removeprefix(cut)}", line 3\n'
    assert places.named_in(text) == [(f"{OURS}/replicated.py", 7), (MINE, 3)]


def test_a_line_is_quoted_in_part() -> None:
    number = next(n for n, line in enumerate(pathlib.Path(MINE).read_text().splitlines(), 1) if "KERAS =" in line)
    assert places.Place(MINE, number, True).quoted() == f"{MINE}:{number} (KERAS = pathlib.Path(keras.__file__).parent)"
    assert places.Place("/no/such/file.py", 3, True).quoted() == "/no/such/file.py:3"


def test_an_operation_of_a_graph_is_found_by_the_text_of_its_error() -> None:
    @tf.function(jit_compile=True, autograph=False)
    def refused(x):
        return tf.strings.length(tf.strings.as_string(x))  # here

    try:
        refused(tf.constant(1.0))
        raise AssertionError
    except tf.errors.InvalidArgumentError as error:
        assert "# here" in pathlib.Path(MINE).read_text().splitlines()[places.of_error(error).line - 1]
