"""Which hosts a TPU slice has, where each runs a process of its own, and what JAX cannot use."""

import dataclasses
import pathlib
import socket
import urllib.parse

import pytest

from tests.test_cluster import tf_config
from tests.tpu_api_server import TpuApi
from trainer import hardware, tpu_slice
from trainer.errors import ConfigError, RetryError

GKE = {"TPU_WORKER_HOSTNAMES": "host-0.svc,host-1.svc,host-2.svc", "TPU_WORKER_ID": "1"}


@pytest.fixture
def root(tmp_path: pathlib.Path) -> str:
    """That of a machine with chips."""
    chip = tmp_path / "dev/vfio/0"
    chip.parent.mkdir(parents=True)
    chip.touch()
    return f"{tmp_path}/"


def resolved(root: str, tpu: str = "local", **environ: str) -> hardware.Target:
    return hardware.resolve(tpu=tpu, backend="jax", environ=environ, root=root)


def test_gke_names_the_hosts(root: str) -> None:
    found = resolved(root, **GKE)
    assert found.workers is not None
    assert found.workers.addresses == ("host-0.svc:8482", "host-1.svc:8482", "host-2.svc:8482")
    assert (found.tpu, found.workers.index, found.is_chief, found.is_remote) == ("local", 1, False, False)
    assert resolved(root, **GKE | {"TPU_WORKER_ID": "0"}).is_chief
    alone = resolved(root, TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
    assert (alone.workers, alone.is_chief) == (None, True)


def test_tf_config_wins_over_the_hosts_of_a_slice(root: str) -> None:
    found = resolved(root, TF_CONFIG=tf_config([1, 2], 0), **GKE)
    assert found.workers is not None and found.workers.addresses == ("127.0.0.1:1", "127.0.0.1:2")


@pytest.mark.parametrize(
    "environ", [{}, {"TPU_NAME": "my-tpu"}, {"TPU_CONFIG": '{"tpu_node_name": "my-tpu", "zone": "z", "project": "p"}'}]
)
def test_the_tpu_of_this_environment_is_that_of_this_machine(root: str, environ: dict[str, str]) -> None:
    found = resolved(root, "auto", **environ)
    assert (found.tpu, found.zone, found.workers, found.source) == ("local", None, None, "1 chips on this machine")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (GKE | {"TPU_WORKER_ID": "3"}, "this one among them, from 0. Received: host-0.svc,.*, TPU_WORKER_ID=3"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID=unset"),
        ({"TPU_WORKER_HOSTNAMES": "a,a", "TPU_WORKER_ID": "0"}, "each host of the TPU slice once"),
        (GKE | {"MEGASCALE_NUM_SLICES": "2"}, "one of several TPU slices .* Received: MEGASCALE_NUM_SLICES=2"),
    ],
)
def test_hosts_that_contradict_each_other(root: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(root, **environ)


@pytest.mark.parametrize("tpu", ["my-tpu", "grpc://10.0.0.2:8470"])
def test_jax_uses_no_tpu_over_the_network(root: str, tpu: str) -> None:
    with pytest.raises(ConfigError, match=f"none over the network: .* on every host .* Received: --tpu={tpu}"):
        resolved(root, tpu)


def test_no_chips_here(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="This machine has no TPU"):
        resolved(f"{tmp_path}/")
    with pytest.raises(ConfigError, match="none over the network: .* Received: TPU_CONFIG unset, TPU_NAME=my-tpu"):
        resolved(f"{tmp_path}/", "auto", TPU_NAME="my-tpu")


def located(target: hardware.Target, attributes: dict[str, str], **environ: str) -> hardware.Target:
    with TpuApi({}, attributes) as server:
        environ = {"GCE_METADATA_IP": urllib.parse.urlsplit(server.url).netloc, **environ}
        return tpu_slice.locate(target, timeout_secs=30, environ=environ)


@pytest.mark.parametrize("endpoints", ["10.0.0.1,10.0.0.2", "my-tpu-0:0:10.0.0.1,my-tpu-1:1:10.0.0.2"])
def test_a_tpu_vm_asks_who_the_others_are(root: str, endpoints: str) -> None:
    environment = "ACCELERATOR_TYPE: 'v5litepod-16'\nMEGASCALE_NUM_SLICES: '1'\n"
    told = {"worker-network-endpoints": endpoints, "agent-worker-number": "1", "tpu-env": environment}
    found = located(resolved(root), told)
    assert found.workers is not None and not found.is_chief
    assert (found.workers.addresses, found.workers.index) == (("10.0.0.1:8482", "10.0.0.2:8482"), 1)


def test_a_tpu_vm_of_one_host_or_of_several_slices(root: str) -> None:
    one = {"worker-network-endpoints": "10.0.0.1", "agent-worker-number": "0"}
    assert located(resolved(root), one).workers is None
    with pytest.raises(ConfigError, match="MEGASCALE_NUM_SLICES=4"):
        located(resolved(root), one | {"tpu-env": "MEGASCALE_NUM_SLICES: '4'"})


def test_the_metadata_server_is_asked_only_where_nothing_else_tells(root: str) -> None:
    others = {"worker-network-endpoints": "10.0.0.1,10.0.0.2", "agent-worker-number": "1"}
    target = resolved(root)
    assert located(target, others, TPU_SKIP_MDS_QUERY="1") is target
    assert located(target, others, TPU_WORKER_HOSTNAMES="localhost") is target
    cpu = hardware.resolve(tpu=None, backend="jax", environ={})
    assert located(cpu, others) is cpu
    given = dataclasses.replace(target, workers=resolved(root, **GKE).workers)
    assert located(given, others) is given


def test_no_metadata_server_and_a_silent_one(root: str) -> None:
    target = resolved(root)
    assert located(target, {}).workers is None
    assert tpu_slice.locate(target, timeout_secs=5, environ={"GCE_METADATA_IP": "127.0.0.1:1"}).workers is None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RetryError, match="metadata server"):
            tpu_slice.locate(target, timeout_secs=0.5, environ={"GCE_METADATA_IP": address})
