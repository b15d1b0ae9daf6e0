"""What to use in place of operations that XLA cannot compile for a TPU. Pure.

The list of operations that are supported: https://docs.cloud.google.com/tpu/docs/tensorflow-ops. Which of them are
refused here was seen by lowering and compiling them (tests/preflight).
"""

import re

# Pattern on the type of an operation, of TensorFlow or a primitive of JAX -> what to do. The first match counts.
_NEVER: tuple[tuple[str, str], ...] = (
    (
        r"(Eager|Stateless)?PyFunc|PyFuncStateless",
        "Python runs on the host only (py_function, numpy_function): write it in TensorFlow or keras.ops, or do it in "
        "the input pipeline",
    ),
    (
        r"(Decode|Encode)(?!Proto).*|ReadFile|ParseExample.*|ParseSingleExample",
        "Decode and parse in the input pipeline, and give the model numbers",
    ),
    (r"Print.*|StringFormat", "Leave out tf.print; values to look at go into a metric"),
    (
        r"AsString|String.*|Substr|Regex.*|Unicode.*|StaticRegex.*",
        "XLA knows no strings: turn texts into ids in the input pipeline",
    ),
    (
        r"Lookup.*|.*HashTable.*|InitializeTable.*",
        "Look up in the input pipeline, or use a constant vector and tf.gather",
    ),
    (
        r"ImageProjectiveTransformV\d",
        "Rotate, shift, shear and zoom before training; of Keras' random layers those that flip, crop, erase and "
        "change colours can be compiled",
    ),
    (r"Eig|eig|schur", "Use keras.ops.eigh for a symmetric matrix, keras.ops.svd for singular values"),
    (
        r"(pure|io|debug)_callback|debug_print",
        "Leave it out, or do it in the input pipeline; values to look at go into a metric",
    ),
)
# Those whose sizes or types decide.
_SOMETIMES: tuple[tuple[str, str], ...] = (
    (r"dot_general|conv_general_dilated", "TPUs multiply floats, and integers of up to 32 bits"),
    (r"I?R?FFT.*", "Compute it in complex64; TPUs have no complex128"),
    (
        r"TensorList.*|TensorArray.*",
        "Give the tf.TensorArray its size, with dynamic_size=False, or use tf.scan, tf.map_fn or keras.ops.scan",
    ),
    (
        r"Reshape|Range|Fill|Slice|StridedSlice|Tile|Pad.*|Resize.*|BroadcastTo|.*Bincount|LinSpace|TopK.*|Random.*",
        "A shape that depends on values of the batch cannot be compiled: compute it from static shapes, or use the "
        "largest size with a mask",
    ),
    (r"Ragged.*|Sparse.*", "Use dense tensors with padding and a mask"),
)
_OTHER = "Write it with other operations of keras.ops, or move it to the input pipeline"


def instead_of(operation: str) -> str:
    """What to use in place of a type of operation, such as `DecodeJpeg`; a sentence without its full stop."""
    return _advice(operation, (*_NEVER, *_SOMETIMES)) or _OTHER


def is_never_compiled(operation: str) -> bool:
    """Whether a type of operation is for the host alone, whatever its arguments."""
    return _advice(operation, _NEVER) is not None


def _advice(operation: str, table: tuple[tuple[str, str], ...]) -> str | None:
    return next((advice for pattern, advice in table if re.fullmatch(pattern, operation)), None)
