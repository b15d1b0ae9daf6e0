"""The model's code, its compilation and its memory."""

from trainer.failures.row import Failure

FAILURES = (
    Failure(
        "operation XLA cannot compile",
        ("OpError",),
        r"Detected unsupported operations when trying to compile graph",
        "XLA, which a TPU needs, cannot compile an operation of the model",
        "Use another: Python functions, strings and decoding belong into the data; --mode=preflight finds all of them "
        "without a TPU. On CPU and GPU --xla=off does without XLA",
        "Compilation failure: Detected unsupported operations when trying to compile graph _functionalize_body_14[] on "
        "XLA_TPU_JIT:ResizeNearestNeighbor, ResizeNearestNeighborGrad",
        "tensorflow/tpu#176; keras-team/keras#15317; tensorflow/tensorflow#66074; here",
    ),
    Failure(
        "shape not known to XLA",
        ("OpError",),
        r"must be a compile-time constant|Dynamic concatenation is not supported|dynamic_dimension_inference|"
        r"input dynamic dimension",
        "a shape in the model depends on values, and XLA compiles only shapes that are known beforehand",
        "Pad to a fixed shape and mask, in place of boolean_mask, where or a size that is computed",
        "Compilation failure: Dynamic concatenation is not supported yet: %reshape.3993 = s32[832]{0} "
        "reshape(s32[2,416]{1,0} %reshape.621)\n\tTPU compilation failed",
        "tensorflow/tensorflow#36194, #48602, #29825; here",
    ),
    Failure(
        "out of HBM",
        (),
        r"memory space hbm|CompileTimeHbmOom|hbm capacity|exceeds available HBM",
        "the train step does not fit into the memory of a TPU core",
        "Lower --global_batch_size, use a larger slice or --precision=mixed_bfloat16; --mode=preflight finds the "
        "largest batch that fits",
        "Compilation failure: Ran out of memory in memory space hbm. Used 8.38G of 8.00G hbm. Exceeded hbm capacity by "
        "385.25M.",
        "tensorflow/tpu#385; here, by XLA:TPU ahead of time: E1000: CompileTimeHbmOom",
    ),
    Failure(
        "out of vector memory",
        (),
        r"memory space vmem",
        "XLA ran out of the vector memory of a TPU core, which is a fault of the compiler",
        "Change --global_batch_size or the sizes of the layer a little, or install another libtpu",
        "Compilation failure: Ran out of memory in memory space vmem. It should not be possible to run out of vmem - "
        "please file a bug against XLA.",
        "tensorflow/tensorflow#38272, #26893",
    ),
    Failure(
        "out of device memory",
        ("ResourceExhaustedError", "InternalError", "UnknownError"),
        r"OOM when allocating tensor|Out of memory while trying to allocate|[Ff]ailed to allocate memory",
        "a device has not enough memory",
        "Lower --global_batch_size, use more replicas or --precision=mixed_bfloat16",
        "OOM when allocating tensor with shape[1048576,1048576] and type float on "
        "/job:localhost/replica:0/task:0/device:CPU:0 by allocator mklcpu [Op:Fill] name: ",
        "here",
    ),
    Failure(
        "out of host memory",
        ("MemoryError",),
        "",
        "this machine has not enough memory",
        "Lower --shuffle_mib or --global_batch_size, or use a machine with more",
        "Unable to allocate 8.00 TiB for an array with shape (1048576, 1048576) and data type float64",
        "here; tensorflow/models#7725 and tensorflow/tensorflow#32265, where the process was killed",
    ),
    Failure(
        "XLA of the model's own on several replicas",
        ("OpError",),
        r"Trying to access resource .* located in device",
        "the model compiles itself with XLA (jit_compile=True), which replicas of one process cannot share",
        "Take jit_compile out of its code; --xla=on compiles what can be compiled",
        "Trying to access resource dense/kernel/replica_1/3 (defined @ core.py:31) located in device "
        "/job:localhost/replica:0/task:0/device:CPU:1 from device /job:localhost/replica:0/task:0/device:CPU:0",
        "keras-team/keras#19005; tensorflow/tensorflow#53140; here",
    ),
    Failure(
        "reduction inside of a function or condition",
        ("RuntimeError",),
        r"`merge_call` called while defining a new graph",
        "the model's step has a tf.function of its own, or a condition around its optimizer, and replicas cannot meet "
        "in there",
        "Take @tf.function out of the model's code, and gradient_accumulation_steps or ema_overwrite_frequency out of "
        "the optimizer",
        "`merge_call` called while defining a new graph or a tf.function. This can often happen if the function `fn` "
        "passed to `strategy.run()` contains a nested `@tf.function`",
        "here",
    ),
    Failure(
        "made outside of the strategy",
        ("ValueError", "RuntimeError"),
        r"Trying to create optimizer slot variable under the scope|Need to be inside \"with strategy.scope",
        "a variable of the model, its optimizer or its metrics was made before there were replicas",
        "Make all of them inside of build and compile_args, none while a module is imported",
        "Trying to create optimizer slot variable under the scope for tf.distribute.Strategy (OneDeviceStrategy), "
        "which is different from the scope used for the original variable. Make sure the slot variables are created "
        "under the same strategy scope. This may happen if you're restoring from a checkpoint outside the scope",
        "huggingface/transformers#4456; tensorflow/tensorflow#55713; here",
    ),
    Failure(
        "Python condition on a tensor",
        ("TypeError",),
        r"as a Python `bool` is not allowed",
        "the model's code decides in Python by a value that only the devices know",
        "Use keras.ops.where or keras.ops.cond",
        "Using a symbolic `tf.Tensor` as a Python `bool` is not allowed.",
        "here",
    ),
    Failure(
        "recomputation of a layer",
        ("ValueError",),
        r"custom_gradient decorator currently supports keywords arguments only",
        "keras.RematScope, which Keras cannot take into a compiled step for layers called with keywords",
        "Recompute within a layer: keras.remat(function)(x) in its call",
        "The custom_gradient decorator currently supports keywords arguments only when eager execution is enabled.",
        "here",
    ),
    Failure(
        "variable made while running",
        ("ValueError",),
        r"tf\.function only supports singleton tf\.Variables",
        "the model makes variables while it runs",
        "Make them in __init__ or in build of a layer",
        "tf.function only supports singleton tf.Variables created on the first call. Make sure the tf.Variable is only "
        "created once or created outside tf.function.",
        "here",
    ),
    Failure(
        "label out of range",
        ("OpError",),
        r"Received a label value of",
        "a label is none of the model's classes",
        "Set --num_classes to more than the largest label, or give the model's last layer as many units",
        "Received a label value of 7 which is outside the valid range of [0, 3).  Label values: 7 1",
        "here",
    ),
    Failure(
        "index out of range",
        ("OpError",),
        r"indices\[[^\]]*\] = \S+ is not in \[0, \d+\)",
        "the model looks up an index that its table, such as an embedding, does not have",
        "Give the table more entries than the largest value of the data; `python -m data.audit DIR` reads them all",
        "indices[0,1] = 9 is not in [0, 3)",
        "here",
    ),
    Failure(
        "batch and replicas",
        ("ValueError", "AssertionError"),
        r"(batch[ _]size|global_batch_size).{0,40}(must be|is not) divisible by",
        "the batch does not divide over the replicas",
        "Choose a --global_batch_size that is a multiple of their number",
        "batch_size must be divisible by the number of TPU cores in use (6 vs 8)",
        "tensorflow/tensorflow#27313; google-research/bert#67",
    ),
    Failure(
        "not finite",
        ("OpError",),
        r"Tensor had (NaN|Inf|-Inf)",
        "a tensor that the model checks holds NaN or infinity",
        "Lower --learning_rate, set --global_clipnorm, or keep that part in float32; without the model's own check "
        "--on_nonfinite says what happens, and names the layer",
        "loss : Tensor had NaN values",
        "here; tensorflow/similarity#364 and tensorflow/models#11121, where the loss was",
    ),
    Failure(
        "unknown name in Keras",
        ("ValueError",),
        r"Could not interpret [\w ]+ identifier",
        "the model's code names a loss, a metric, an initializer or the like that Keras does not have",
        "Mend the name in build or compile_args",
        "Could not interpret loss identifier: no_such_loss",
        "here",
    ),
    Failure(
        "module is no Python",
        ("SyntaxError",),
        "",
        "a module is not valid Python",
        "Mend that line",
        "invalid syntax (net.py, line 3)",
        "here",
    ),
    Failure(
        "import fails",
        ("ImportError",),
        "",
        "a module cannot be imported",
        "Install what it needs, or mend the name",
        "cannot import name 'Nothing' from 'keras'",
        "here",
    ),
    Failure(
        "endless recursion",
        ("RecursionError",),
        "",
        "code calls itself without end, or nests deeper than Python allows",
        "Mend that code; a very deep functional model can be split into nested ones",
        "maximum recursion depth exceeded",
        "here",
    ),
)
