"""JAX: its devices, its processes, and models that it cannot trace."""

from trainer.failures.row import Failure

_GOES_ON = "The same command goes on from the last checkpoint"

FAILURES = (
    Failure(
        "JAX in use too early",
        ("RuntimeError",),
        r"config should be updated before backends are initialized|called before any JAX calls",
        "something uses JAX already, and its devices must be set up before: an array made earlier, perhaps by an "
        "import of --model",
        "Make none while a module is imported, only inside of build and compile_args",
        "jax_num_cpu_devices config should be updated before backends are initialized i.e. before any JAX operation is "
        "executed. You should initialize this config immediately after `import jax`.",
        "here",
    ),
    Failure(
        "no TPU for JAX",
        ("RuntimeError",),
        r"Unable to initialize backend 'tpu'|Unknown backend:? '?tpu|No TPU devices? (was |were )?found",
        "JAX finds no TPU that it can use",
        "Install the extra `jax-tpu` in place of another, and in a container pass the TPU's devices on; --mode=doctor "
        "looks at chips, libtpu and versions",
        "Unable to initialize backend 'tpu': NOT_FOUND: No ba16c7433 device found. (set JAX_PLATFORMS='' to "
        "automatically choose an available backend)",
        "jax-ml/jax#13260, #18780",
    ),
    Failure(
        "no GPU for JAX",
        ("RuntimeError",),
        r"Unable to initialize backend '(cuda|gpu|rocm)'|Unknown backend:? '?(cuda|gpu)",
        "JAX finds no GPU that it can use",
        "Install the extra `jax-gpu` and a driver that goes with it (`nvidia-smi`), or set JAX_PLATFORMS=cpu to train "
        "on the CPU",
        "Unable to initialize backend 'cuda': FAILED_PRECONDITION: No visible GPU devices. (set JAX_PLATFORMS='' to "
        "automatically choose an available backend)",
        "jax-ml/jax#24866, #28376",
    ),
    Failure(
        "out of memory on JAX",
        ("JaxRuntimeError", "XlaRuntimeError", "ValueError"),
        r"RESOURCE_EXHAUSTED.*([Oo]ut of memory|[Ff]ailed to allocate)",
        "a device has not enough memory",
        "Lower --global_batch_size, use more replicas or --precision=mixed_bfloat16",
        "RESOURCE_EXHAUSTED: Out of memory allocating 1125899906842624 bytes.",
        "here",
    ),
    Failure(
        "random numbers without a seed",
        ("ValueError",),
        r"\[JAX RNG\] When tracing",
        "the model draws random numbers without a state of its own, and in a compiled step of JAX they would be the "
        "same at every step",
        "Make `self.seed_generator = keras.random.SeedGenerator(seed)` in __init__ of the layer, and draw with "
        "seed=self.seed_generator",
        "[JAX RNG] When tracing a JAX function, you should only use seeded random ops, e.g. you should create a "
        "`SeedGenerator` instance, attach it to your layer/model, and pass the instance as the `seed` argument when "
        "calling random ops.",
        "here",
    ),
    Failure(
        # Keras makes JAX' own errors anew, which it cannot: their last part is all that is left.
        "value of a tensor in Python",
        ("TypeError", "RuntimeError", "AttributeError", "ValueError"),
        r"has no attribute '_error_repr'|(called on|conversion of) traced array|Abstract tracer value",
        "the model's code wants to know the value of a tensor in Python (if, float, NumPy, TensorFlow), and in a "
        "compiled step only the devices know it",
        "Use keras.ops for all that is done with tensors, keras.ops.where or keras.ops.cond for conditions; code that "
        "needs TensorFlow runs with --backend=tensorflow",
        "Attempted boolean conversion of traced array with shape bool[].\nThe error occurred while tracing the "
        "function step at step.py:41 for jit. This concrete value was not available in Python because it depends on "
        "the value of the argument x.",
        "here",
    ),
    Failure(
        "shape not known to JAX",
        ("IndexError", "RuntimeError", "ValueError"),
        r"boolean indices must be concrete",
        "a shape in the model depends on values, and JAX compiles only shapes that are known beforehand",
        "Pad to a fixed shape and mask (keras.ops.where with three arguments), in place of a boolean index",
        "Array boolean indices must be concrete; got bool[4,3]",
        "here",
    ),
    Failure(
        "tensor kept from another step",
        ("UnexpectedTracerError",),
        "",
        "the model's code keeps a tensor of one step (in an attribute, a list, a global) and uses it in another",
        "Keep it in a keras.Variable (self.add_weight) and assign to that",
        "Encountered an unexpected tracer. A function transformed by JAX had a side effect, allowing for a reference "
        "to an intermediate value with type float32[] wrapped in a DynamicJaxprTracer to escape the scope of the "
        "transformation.",
        "here",
    ),
    Failure(
        "process lost on JAX",
        ("JaxRuntimeError", "XlaRuntimeError", "ValueError", "RuntimeError"),
        r"Gloo \S+ failed|CoordinationService|coordination service|^(UNAVAILABLE|DEADLINE_EXCEEDED): |"
        r"NCCL.*(remote|unhandled system) error",
        "lost the connection to a worker",
        _GOES_ON,
        "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
        "[127.0.0.1]:59610",
        "here; jax-ml/jax#23599; marin-community/levanter#432",
        retryable=True,
    ),
)
