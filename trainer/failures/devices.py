"""TPUs, workers and the way to them."""

from trainer.failures.row import Failure

FAILURES = (
    Failure(
        "no TPU named",
        ("ValueError",),
        r"Please provide a TPU Name",
        "no TPU was named, and nothing in the environment names one",
        "Give --tpu=NAME, --tpu=local or --tpu=grpc://IP:PORT, or set TPU_NAME",
        "Please provide a TPU Name to connect to.",
        "tensorflow/tensorflow#70827; here",
    ),
    Failure(
        "several TPUs named",
        ("NotImplementedError",),
        r"Using multiple TPUs in a single session",
        "more than one TPU was named",
        "Name one with --tpu; a pod slice is one TPU, of one name",
        "Using multiple TPUs in a single session is not yet implemented",
        "here",
    ),
    Failure(
        "no TPU there",
        ("OpError",),
        r"TPU_SYSTEM",
        "what answers has no TPU, or another process holds it",
        "Give the address of a TPU worker (port 8470); on a TPU VM, end the process that holds the chips",
        "No matching devices found for '/device:TPU_SYSTEM:0' [Op:__inference__tpu_init_fn_10]",
        "GoogleCloudPlatform/ml-testing-accelerators#809; here",
    ),
    Failure(
        "TensorFlow without TPU support",
        ("OpError",),
        r"No OpKernel was registered to support Op '(ConfigureDistributedTPU|TPU)",
        "TensorFlow has no TPU support there",
        "Install the extra `tpu` in place of `cpu`; --mode=doctor looks at wheel and libtpu",
        "No OpKernel was registered to support Op 'ConfigureDistributedTPU' used by node ConfigureDistributedTPU "
        '(defined at ops.py:1748) with these attrs: [tpu_embedding_config="", is_global_init=false]',
        "google-research/google-research#651; tensorflow/tensorflow#96203; here",
    ),
    Failure(
        "TPU in use",
        (),
        r"libtpu\.so (is )?already in use|TPU is already in use by|multi-process lockfile|"
        r"FindAndLoadTpuLibrary failed with ABORTED",
        "another process holds the TPU",
        "Wait for its end, or end it: `sudo lsof -w /dev/accel0 /dev/vfio/0` names it. If there is none, remove "
        "/tmp/libtpu_lockfile",
        'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".',
        "jax-ml/jax#10192; tensorflow/tensorflow#82208; here, as a line of the log",
        retryable=True,
    ),
    Failure(
        "libtpu finds no TPU",
        ("InternalError",),
        r"tpu_node_interfaces",
        "libtpu finds no TPU",
        "Run on a TPU VM, with its devices passed on to the container",
        "RET_CHECK failure (tensorflow/core/tpu/tpu_node_interfaces.cc) *platform",
        "here, with tensorflow-tpu 2.20 off Google Cloud (shortened)",
    ),
    Failure(
        "libtpu too new",
        (),
        r"\w not available in this library",
        "this libtpu lacks what this TensorFlow calls",
        "Run: pip install 'libtpu>=0.0.14,<0.0.32'",
        "ConfigureDistributedTpuOp_DoWork not available in this library.",
        "here, with libtpu 0.0.52, as the last line of a process that aborts",
    ),
    Failure(
        "no metadata server",
        (),
        r"Failed to get TPU metadata",
        "libtpu asks the metadata server, which only machines on Google Cloud have",
        "Elsewhere set TPU_SKIP_MDS_QUERY=1, or install the extra `cpu`",
        "Failed to get TPU metadata (tpu-env) from instance metadata for variable CHIPS_PER_HOST_BOUNDS: "
        "INTERNAL: Couldn't connect to server",
        "google/gvisor#10795; here, as a line of the log",
    ),
    Failure(
        "versions of client and worker differ",
        ("OpError",),
        r"NodeDef expected inputs .* do not match \d+ inputs specified",
        "the TPU worker runs another version of TensorFlow than this machine",
        "Make the TPU with the runtime version of the TensorFlow here, or install the one it has; --mode=doctor "
        "compares them",
        "NodeDef expected inputs 'string' do not match 0 inputs specified; Op<name=_Send; signature=tensor:T -> ; "
        "attr=T:type; attr=tensor_name:string>; NodeDef: {{node _Send}}",
        "tensorflow/models#8457; tensorflow/tensorflow#41075, #40622",
    ),
    Failure(
        "part of a pod slice",
        ("RuntimeError",),
        r"TPU cores on each host is not same",
        "TensorFlow sees only a part of the hosts of a pod slice",
        "Run on worker 0 only, with --tpu=NAME instead of --tpu=local and TPU_LOAD_LIBRARY=0 in the environment",
        "TPU cores on each host is not same. This should not happen!",
        "tensorflow/tensorflow#56760",
    ),
    Failure(
        "TPU was reset",
        ("OpError",),
        r"TPU system has not been initialized",
        "the TPU was restarted or taken away under the run",
        "The same command goes on from the last checkpoint",
        "The TPU system has not been initialized.\n\t [[node shared/embedding_slot_vr_1/Slice_24]]",
        "tensorflow/tensorflow#43707",
        retryable=True,
    ),
    Failure(
        "XLA for the host of a TPU",
        ("NotFoundError",),
        r"registered transfer manager for platform",
        "something is compiled by XLA for the host of a TPU, which cannot: code with jit_compile=True of its own, or a "
        "grouped convolution outside of the train step",
        "Take jit_compile out of the model's code, and call no layer on numbers outside of the train step",
        "could not find registered transfer manager for platform Host -- check target linkage\n"
        "\t [[{{node StatefulPartitionedCall}}]] [Op:__inference_multi_step_on_iterator_33145]",
        "tensorflow/tensorflow#88960, #61976; keras-team/keras#19448; googlecolab/colabtools#5124",
    ),
    Failure(
        "two TPU frameworks",
        (),
        r"TPU platform already registered",
        "JAX or PyTorch took the TPU in this process before TensorFlow",
        "Import neither in code that --model names",
        "FAILED_PRECONDITION: TPU platform already registered for platform hardware version",
        "AI-Hypercomputer/maxtext#20",
    ),
    Failure(
        "two Cloud TPU clients",
        ("DuplicateFlagError",),
        r"(runtime_oom_exit|hbm_oom_exit)",
        "two copies of the Cloud TPU client were imported",
        "Import neither cloud_tpu_client nor tensorflow.python.tpu.client in code that --model names",
        "The flag 'runtime_oom_exit' is defined twice. First from cloud_tpu_client.client, second from "
        "tensorflow.python.tpu.client.client. Description from first occurrence: Exit the script when the TPU runtime "
        "is OOM.",
        "here",
    ),
    Failure(
        "TensorFlow in use too early",
        ("RuntimeError",),
        r"Collective ops must be configured at program startup|"
        r"(Virtual|Visible|Physical) devices cannot be modified after being initialized",
        "replicas must be set up before anything else uses TensorFlow, and something has: a tensor, variable or "
        "strategy made earlier, perhaps by an import of --model",
        "Make none while a module is imported, only inside of build and compile_args",
        "Collective ops must be configured at program startup",
        "tensorflow/tensorflow#55178; here",
    ),
    Failure(
        "worker was restarted",
        ("OpError",),
        r"Unable to find a context_id",
        "a TPU worker was restarted or lost under the run",
        "The same command goes on from the last checkpoint",
        "2 root error(s) found.\n  (0) Unavailable: Socket closed\n  (1) Unavailable: Unable to find a context_id "
        "matching the specified one (12465293436922014039). Perhaps the worker was restarted, or the context was GC'd?",
        "tensorflow/tensorflow#47460",
        retryable=True,
    ),
    Failure(
        "workers missing",
        ("OpError",),
        r"RegisterTask",
        "not every worker came within --connect_timeout_secs",
        "Start them all and run again",
        "Deadline Exceeded\nAdditional GRPC error information from remote target coordination_service while calling "
        "/tensorflow.CoordinationService/RegisterTask:\n:Deadline Exceeded",
        "here",
        retryable=True,
    ),
    Failure(
        "port in use",
        ("OpError",),
        r"Could not start gRPC server",
        "the port of this worker is in use",
        "Wait for the other run's end, or give TF_CONFIG another port",
        "Could not start gRPC server",
        "here",
        retryable=True,
    ),
)

_LOST = "lost the connection to a worker, a TPU or the storage"
_GOES_ON = "The same command goes on from the last checkpoint"

LOST = (
    Failure(
        "connection lost",
        ("UnavailableError", "AbortedError", "DeadlineExceededError"),
        "",
        _LOST,
        _GOES_ON,
        "Socket closed\nAdditional GRPC error information from remote target /job:worker/replica:0/task:0",
        "tensorflow/tensorflow#46007; here",
        retryable=True,
    ),
    Failure(
        # In messages of gRPC and of TensorFlow's collectives and coordination service when a process is gone. Errors of
        # a Python function in a graph, which may tell of anything, begin with their type.
        "process at the other end gone",
        ("InternalError", "UnknownError", "CancelledError"),
        r"^(?!(Assertion|Attribute|Index|Key|Lookup|Name|Runtime)Error: ).*"
        r"(Socket closed|Connection reset|Broken pipe|failed to connect|unreachable|heartbeat|recvmsg|preempted)",
        _LOST,
        _GOES_ON,
        "Task /job:jax_worker/replica:0/task:37 heartbeat timeout. This indicates that the remote task has failed, got "
        "preempted, or crashed unexpectedly.",
        "EleutherAI/architecture-objective#26; here",
        retryable=True,
    ),
)
