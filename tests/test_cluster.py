"""Cluster: what flags and environment resolve to, and real connections to real processes on this machine.

A strategy takes over its whole process, so whatever connects runs in processes of its own, several cases each. No real
TPU is here: the TPU worker is a tf.distribute.Server without one, and the last error says so.
"""

import collections
import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from tests.tpu_api_server import PROJECT, ZONE, Node, TpuApi
from trainer import hardware
from trainer.errors import ConfigError
from trainer.workers import Workers

ROOT = pathlib.Path(__file__).parents[1]
GUARD_SECS = 120  # only ends a test that hangs

# Every connecting process starts with this. `attempt` prints one JSON line: what the attempt ended in.
PRELUDE = """
import json, os, sys
from trainer.cluster import connect
from trainer.hardware import resolve
from trainer.errors import TrainerError

def attempt(use=None, timeout=60, **flags):
    made = None
    try:
        made = connect(resolve(**{"tpu": None, **flags}), connect_timeout_secs=timeout)
        said = {"kind": made.kind, "replicas": made.num_replicas, "workers": made.num_workers, "chief": made.is_chief,
                "index": made.worker_index, "hosts": made.num_hosts, "text": made.description}
    except TrainerError as error:
        said = {"exit": error.exit_code, "text": str(error)}
    if made and use:
        said["value"] = use(made)
    print(json.dumps(said), flush=True)

def total(made):
    "Sum over replicas of 1, 2, 3, ... as the replicas themselves add them up."
    import tensorflow as tf

    @tf.function
    def step():
        def on_replica():
            context = tf.distribute.get_replica_context()
            mine = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)
        return made.strategy.run(on_replica)
    return [float(v) for v in made.strategy.experimental_local_results(step())]
"""
ENDING = "\nos._exit(0)  # a thread that TensorFlow never leaves must not hold the process, as in trainer.main\n"


@pytest.fixture
def start():
    """Starts a script with `attempt` and `total` at hand in a process that ends with the test at the latest.

    Takes the script and the variables to set in its environment.
    """
    processes = []

    def popen(script: str, **environ: str) -> subprocess.Popen:
        env = {
            k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith(("TPU", "TF_CONFIG"))
        }
        env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT), **environ}
        source = PRELUDE + textwrap.dedent(script) + ENDING
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen([sys.executable, "-c", source], env=env, cwd=ROOT, text=True, stdout=pipe, stderr=pipe)
        )
        return processes[-1]

    yield popen
    for process in processes:
        process.kill()
        process.communicate()


def results(process: subprocess.Popen) -> list[dict]:
    out, err = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 0, err[-3000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def tf_config(ports: list[int], index: int, job: str = "worker") -> str:
    return json.dumps({"cluster": {job: [f"127.0.0.1:{p}" for p in ports]}, "task": {"type": job, "index": index}})


@pytest.fixture
def tpu_worker(start):
    """(host, port) of a TensorFlow server in a process of its own, as runs on a TPU's host; it has no TPU."""
    [port] = free_ports(1)
    process = start(f"""
        import tensorflow as tf
        server = tf.distribute.Server({{"worker": ["127.0.0.1:{port}"]}}, job_name="worker", task_index=0)
        print("up", flush=True)
        server.join()
    """)
    assert process.stdout.readline() == "up\n"
    return "127.0.0.1", port


@pytest.fixture
def silent():
    """Opens listeners that greet a client with the given bytes and never answer again; returns their ports."""
    listeners, held = [], []

    def accept(listener: socket.socket, greeting: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            connection.sendall(greeting)

    def listen(greeting: bytes) -> int:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=accept, args=(listeners[-1], greeting), daemon=True).start()
        return listeners[-1].getsockname()[1]

    yield listen
    for s in [*listeners, *held]:
        s.close()


# --- resolve: flags and environment, no TensorFlow ---


def resolved(tpu, environ=None, **flags):
    return hardware.resolve(tpu=tpu, environ=environ or {}, **flags)


def test_resolve_order_of_environment(tmp_path):
    config = json.dumps({"project": "p", "zone": "z", "tpu_node_name": "vertex-node"})
    environ = {"TPU_CONFIG": config, "TPU_NAME": "named", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.0.0.2,10.0.0.3"}
    target = resolved("auto", environ)
    assert (target.tpu, target.zone, target.project, target.is_remote) == ("vertex-node", "z", "p", True)
    assert resolved("auto", environ, tpu_zone="mine").zone == "mine"

    del environ["TPU_CONFIG"]
    target = resolved("auto", environ)
    assert (target.tpu, target.source) == ("named", "TPU_CONFIG unset, TPU_NAME=named")
    del environ["TPU_NAME"]
    target = resolved("auto", environ)
    assert target.tpu == "grpc://10.0.0.2:8470,10.0.0.3:8470"
    assert target.addresses == (("10.0.0.2", 8470), ("10.0.0.3", 8470))

    (tmp_path / "dev").mkdir()
    with pytest.raises(ConfigError, match="no TPU.*TPU_CONFIG, TPU_NAME, KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS unset"):
        resolved("auto", root=str(tmp_path))


def test_resolve_local_needs_chips(tmp_path):
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/vfio").touch()
    for tpu, environ in (("local", {}), ("auto", {}), ("auto", {"TPU_NAME": "local"})):
        with pytest.raises(ConfigError, match="no TPU"):
            resolved(tpu, environ, root=str(tmp_path))
    (tmp_path / "dev/vfio/0").touch()
    for tpu, environ in (("local", {}), ("auto", {}), ("auto", {"TPU_NAME": "local"})):
        target = resolved(tpu, environ, root=str(tmp_path))
        assert (target.tpu, target.is_remote) == ("local", False)
    (tmp_path / "dev/accel0").touch()
    assert len(hardware.local_chips(str(tmp_path))) == 2


@pytest.mark.parametrize(
    ("tpu", "remote"),
    [
        (None, False),
        ("my-tpu", True),
        ("grpc://10.0.0.2", True),
        ("grpc://127.0.0.1:1", False),
        ("grpc://127.0.0.1:1,grpc://10.0.0.2", True),
    ],
)
def test_resolve_knows_whose_disk_is_used(tpu, remote):
    assert resolved(tpu).is_remote is remote


@pytest.mark.parametrize(
    ("tpu", "flags", "environ", "message"),
    [
        ("10.0.0.2:8470", {}, {}, "did you mean grpc://10.0.0.2:8470"),
        ("10.0.0.2", {}, {}, "did you mean grpc://10.0.0.2"),
        ("http://10.0.0.2", {}, {}, "'http://10.0.0.2' is no name"),
        ("", {}, {}, "'' is no name"),
        ("grpc://", {}, {}, "is not grpc://HOST"),
        ("grpc://a:99999", {}, {}, "is not grpc://HOST"),
        ("grpc://a:1", {"tpu_zone": "z"}, {}, "tpu_zone=z"),
        (None, {"tpu_project": "p"}, {}, "no effect without --tpu"),
        ("my-tpu", {"replicas": 2}, {}, "--replicas=2 has no effect"),
        (None, {"replicas": 0}, {}, "Received: 0"),
        ("my-tpu", {}, {"TF_CONFIG": tf_config([1, 2], 0)}, "one process drives"),
        ("auto", {}, {"TPU_CONFIG": "{"}, "TPU_CONFIG is not JSON"),
        ("auto", {}, {"TPU_CONFIG": '{"zone": "z"}'}, "tpu_node_name"),
        ("auto", {}, {"TPU_NAME": "10.0.0.2:8470"}, "did you mean.*TPU_NAME=10.0.0.2:8470"),
    ],
)
def test_resolve_refuses(tpu, flags, environ, message):
    with pytest.raises(ConfigError, match=message):
        resolved(tpu, environ, **flags)


def test_tf_config():
    text = json.dumps({"cluster": {"worker": ["b:1", "c:1"], "chief": ["a:1"], "ps": []}, "task": {"type": "worker"}})
    workers = resolved(None, {"TF_CONFIG": text.replace('"type"', '"index": 1, "type"')}).workers
    assert workers == Workers(("a:1", "b:1", "c:1"), 2, (("chief", 1), ("worker", 2)))
    for alone in ("", "{}", '{"cluster": {}}', '{"environment": "cloud"}', tf_config([1], 0, "chief")):
        assert resolved(None, {"TF_CONFIG": alone}).workers is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{cluster", "not JSON"),
        ("[]", "is not"),
        ('{"cluster": ["a:1"]}', "is not"),
        ('{"cluster": {"worker": "a:1"}}', "list of"),
        ('{"cluster": {"worker": ["a"]}}', "list of"),
        ('{"cluster": {"worker": ["a:1", "a:1"]}}', "each address once"),
        ('{"cluster": {"chief": ["a:1", "b:1"]}}', "one chief"),
        ('{"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}}', "of type ps"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 1}}', "must name"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}', "must name"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": -1}}', "must name"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', "must name"),
    ],
)
def test_tf_config_refused(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolved(None, {"TF_CONFIG": text})
    assert str(caught.value).endswith(f"Received: {text}")


def test_resolve_imports_no_tensorflow(start):
    [modules] = results(
        start("""
        resolve(tpu="my-tpu", replicas=None)
        print(json.dumps({"tensorflow": "tensorflow" in sys.modules}), flush=True)
    """)
    )
    assert modules == {"tensorflow": False}


# --- connect: real connections ---


@pytest.mark.slow
def test_named_tpu(start, tmp_path, tpu_worker):
    """Every state of the API, through the real cloud-tpu-client; then on to a real worker, which has no TPU."""
    ill = Node("READY", tpu_worker, None, None, "UNHEALTHY_MAINTENANCE", "Host goes down.", ("LOW_MEMORY",))
    nodes = {
        "created": [Node("CREATING"), 503, Node("READY"), Node("READY", tpu_worker, health="HEALTHY")],
        "creating": Node("CREATING"),
        "preempted": Node("PREEMPTED"),
        "stopped": Node("STOPPED"),
        "ill": ill,
    }
    with TpuApi(nodes) as api:
        place = f'tpu_zone="{ZONE}", tpu_project="{PROJECT}"'
        creating, preempted, stopped, ill, unknown, forbidden, failing, proxied, nobody, created = results(
            start(
                f"""
            attempt(tpu="creating", timeout=2, {place})
            attempt(tpu="preempted", {place})
            attempt(tpu="stopped", {place})
            attempt(tpu="ill", timeout=2, {place})
            attempt(tpu="unknown", {place})
            attempt(tpu="403", {place})
            attempt(tpu="503", {place})
            os.environ["http_proxy"] = "http://127.0.0.1:1"
            attempt(tpu="creating", {place})
            del os.environ["http_proxy"]
            del os.environ["GOOGLE_APPLICATION_CREDENTIALS"]
            attempt(tpu="created", {place})
            os.environ["GOOGLE_APPLICATION_CREDENTIALS"] = "{tmp_path}/service-account.json"
            os.environ["TPU_CONFIG"] = json.dumps(dict(tpu_node_name="created", zone="{ZONE}", project="{PROJECT}"))
            attempt(tpu="auto")
        """,
                **api.environ(tmp_path),
            )
        )
    assert creating["exit"] == 75 and "which is CREATING, not READY" in creating["text"]
    assert "Gave up after 2 s" in creating["text"] and "--connect_timeout_secs" in creating["text"]
    assert preempted["exit"] == 75 and "is PREEMPTED" in preempted["text"] and "create it again" in preempted["text"]
    assert stopped["exit"] == 75 and "is STOPPED" in stopped["text"] and "tpu-vm start" in stopped["text"]
    assert ill["exit"] == 75 and "READY but UNHEALTHY_MAINTENANCE; Host goes down.; LOW_MEMORY" in ill["text"]
    assert unknown["exit"] == 78 and "TPU unknown" in unknown["text"] and "does not exist" in unknown["text"]
    assert forbidden["exit"] == 78 and "No permission" in forbidden["text"] and "roles/tpu.viewer" in forbidden["text"]
    assert failing["exit"] == 75 and "503" in failing["text"]
    assert proxied["exit"] == 78 and "Install PySocks" in proxied["text"]
    assert nobody["exit"] == 78 and "without credentials" in nobody["text"]
    assert created["exit"] == 78 and f"127.0.0.1:{tpu_worker[1]}" in created["text"] and "has no TPU" in created["text"]
    looks = collections.Counter(name.rpartition("/")[2] for name in api.asked)
    once = ("preempted", "stopped", "unknown", "403")
    assert {name: looks[name] for name in once} == dict.fromkeys(once, 1)
    assert looks["503"] == 4 and looks["created"] == 4
    assert 2 <= looks["creating"] <= 3  # with growing pauses: no busy loop


@pytest.mark.slow
def test_metadata_server_names_zone_and_project(start, tmp_path, silent):
    """cloud-tpu-client asks metadata.google.internal through urllib, which a proxy leads to loopback here."""
    script = """
        import urllib.request
        for proxy, timeout in {cases}:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({{"http": proxy}}))
            urllib.request.install_opener(opener)
            attempt(tpu="preempted", timeout=timeout)
    """
    with TpuApi({"preempted": Node("PREEMPTED")}) as api:
        cases = [(api.url, 60), ("http://127.0.0.1:1", 60), (f"http://127.0.0.1:{silent(b'')}", 1)]
        told, refused, mute = results(start(script.format(cases=cases), **api.environ(tmp_path)))
    assert told["exit"] == 75 and "is PREEMPTED" in told["text"]
    assert api.asked == [f"projects/{PROJECT}/locations/{ZONE}/nodes/preempted"]
    assert mute["exit"] == 75 and "Gave up after 1 s" in mute["text"] and "metadata server" in mute["text"]
    assert refused["exit"] == 78 and "Give --tpu_project and --tpu_zone" in refused["text"]


@pytest.mark.slow
def test_addresses(start, tpu_worker, silent):
    """Refusing, foreign, silent addresses, and a worker that has no TPU, under a proxy that leads nowhere."""
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # all that an HTTP/2 server says before it falls silent
    http1, mute, falls_silent = silent(b"HTTP/1.1 400 Bad Request\r\n\r\n"), silent(b""), silent(settings)
    proxy = f"http://127.0.0.1:{silent(b'')}"
    worker = f"grpc://127.0.0.1:{tpu_worker[1]}"
    first = start(
        f"""
        attempt(tpu="grpc://127.0.0.1:1")
        attempt(tpu="grpc://no-such-host.invalid")
        attempt(tpu="grpc://127.0.0.1:{http1}")
        attempt(tpu="grpc://127.0.0.1:{mute}", timeout=1)
        attempt(tpu="{worker}", timeout=20)
        attempt(replicas=2)
        os.environ["TF_CONFIG"] = {tf_config([1, 2], 0)!r}
        attempt()
        attempt(replicas=2)
    """,
        http_proxy=proxy,
        https_proxy=proxy,
    )
    second = start(f'attempt(tpu="grpc://127.0.0.1:{falls_silent}", timeout=2)')
    refusing, nobody, foreign, quiet, no_tpu, late_replicas, late_workers, cpu_workers = results(first)
    [half_silent] = results(second)
    assert refusing["exit"] == 75 and "127.0.0.1:1 cannot be reached: Connection refused" in refusing["text"]
    assert nobody["exit"] == 78 and "no-such-host.invalid:8470" in nobody["text"]
    assert foreign["exit"] == 78 and "does not speak gRPC" in foreign["text"]
    assert quiet["exit"] == 75 and f"waiting for the TPU worker 127.0.0.1:{mute} to answer" in quiet["text"]
    assert half_silent["exit"] == 75 and "to take a gRPC session" in half_silent["text"]
    assert no_tpu["exit"] == 78 and "has no TPU" in no_tpu["text"] and worker in no_tpu["text"]
    # By now TensorFlow is in use in that process.
    for late in (late_replicas, late_workers):
        assert late["exit"] == 78 and "before anything else uses TensorFlow" in late["text"]
    assert cpu_workers["exit"] == 78 and "one CPU device a worker" in cpu_workers["text"]


def test_this_machine(start):
    """Virtual CPU replicas add up; and TensorFlow without TPU support on a machine that has chips is told so."""
    one_worker = tf_config([1], 0)  # as Vertex AI sets it for a single machine
    no_support, default, replicas = results(
        start(
            """
        import tempfile, pathlib
        root = pathlib.Path(tempfile.mkdtemp())
        (root / "dev").mkdir()
        (root / "dev/accel0").touch()
        attempt(tpu="local", root=str(root))
        attempt(use=lambda made: type(made.strategy).__name__)
        attempt(use=total, replicas=3)
    """,
            TF_CONFIG=one_worker,
        )
    )
    assert no_support["exit"] == 78 and "extra `tpu`" in no_support["text"]
    assert default["value"] == "_DefaultDistributionStrategy"
    assert (default["kind"], default["replicas"], default["chief"]) == ("cpu", 1, True)
    assert replicas["value"] == [6.0, 6.0, 6.0]
    assert (replicas["kind"], replicas["replicas"], replicas["workers"], replicas["hosts"]) == ("cpu", 3, 1, 1)
    assert "3 virtual replicas" in replicas["text"]


@pytest.mark.slow
def test_two_workers_and_a_missing_one(start):
    """Two processes add up and keep their handler of SIGTERM; a leader and a worker without their peer give up."""
    ports = free_ports(6)
    proxy = "http://127.0.0.1:1"
    script = """
        import signal, threading
        got = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: got.set())

        def use(made):
            value = total(made)
            os.kill(os.getpid(), signal.SIGTERM)
            return [value, got.wait(60)]

        attempt(use=use)
    """
    pair = [start(script, TF_CONFIG=tf_config(ports[:2], i), http_proxy=proxy) for i in range(2)]
    leader = start("attempt(timeout=2)", TF_CONFIG=tf_config(ports[2:4], 0))
    worker = start("attempt(timeout=2)", TF_CONFIG=tf_config(ports[4:6], 1))
    for index, process in enumerate(pair):
        [made] = results(process)
        assert made["value"] == [[3.0], True]
        assert (made["replicas"], made["workers"], made["hosts"]) == (2, 2, 2)
        assert (made["index"], made["chief"]) == (index, index == 0)
    for process, missing in ((leader, ports[3]), (worker, ports[4])):
        [gave_up] = results(process)
        assert gave_up["exit"] == 75 and f"127.0.0.1:{missing}" in gave_up["text"]
        assert "not every worker came within --connect_timeout_secs" in gave_up["text"]
