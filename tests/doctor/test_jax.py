"""What the doctor finds around a run with --backend=jax."""

import importlib.util
import pathlib

import pytest

from tests.doctor.looks import Look, case, look
from tests.doctor.test_machine import install, tpu_vm  # noqa: F401
from tests.doctor.test_machine import look as found_by
from tests.test_cluster import tf_config
from trainer.doctor import accelerator, environment, packages
from trainer.errors import ConfigError

JAX = {"backend": "jax"}


def test_versions_of_the_trainers_jax() -> None:
    assert found_by(packages.jax_versions, case())["JAX versions"].status == "skipped"
    found = found_by(packages.jax_versions, case(**JAX))["JAX versions"]
    assert found.status == "pass" and "jax 0.10.2, jaxlib 0.10.2" in found.what


def test_versions_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    tpu_vm: pathlib.Path,  # noqa: F811
) -> None:
    install(monkeypatch, tmp_path, jaxlib="0.9.0", libtpu="0.0.52")
    found = list(packages.jax_versions(case(**JAX, tpu="local", root=str(tpu_vm))))
    assert [finding.status for finding in found] == ["fail", "fail"]
    assert "jaxlib 0.9.0; needed: jaxlib==0.10.2" in found[0].what
    assert "libtpu 0.0.52; needed: libtpu==0.0.42.1" in found[1].what


def test_jax_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jaxlib" else find(name))
    packages.check_packages(wants_tpu=True)
    for wants_tpu, extra in ((False, "jax"), (True, "jax-tpu")):
        with pytest.raises(ConfigError, match=rf"JAX is not installed. Run: pip install '.\[{extra}\]'"):
            packages.check_packages(wants_tpu=wants_tpu, backend="jax")
    found = found_by(packages.tensorflow_build, case(**JAX))
    assert found["TensorFlow build"].remedy or found["TensorFlow build"].status == "pass"


def test_the_tensorflow_of_tpus_beside_jax(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    install(monkeypatch, tmp_path, tensorflow_tpu="2.20.0", libtpu="0.0.31")
    packages.check_packages(wants_tpu=True)
    with pytest.raises(ConfigError, match=r"tensorflow-tpu would take the chips .* pip install '.\[jax-tpu\]'"):
        packages.check_packages(wants_tpu=True, backend="jax")


def test_the_tensorflow_of_cpus_feeds_the_tpu_of_jax(tpu_vm: pathlib.Path) -> None:  # noqa: F811
    found = found_by(packages.tensorflow_build, case(**JAX, tpu="local", root=str(tpu_vm)))
    assert found["TensorFlow build"].status == "pass"


@pytest.mark.parametrize(
    ("environ", "options", "status", "what"),
    [
        ({"JAX_PLATFORMS": "cpu"}, {"tpu": "local"}, "fail", "cpu keeps JAX from the TPU that --tpu asks for"),
        ({"JAX_PLATFORMS": "tpu,cpu"}, {"tpu": "local"}, "pass", "may compute on"),
        ({"JAX_PLATFORMS": "tpu"}, {}, "fail", "tpu leaves nothing to train on without --tpu"),
        ({"JAX_PLATFORMS": "cuda"}, {}, "pass", "may compute on"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, {"replicas": 2}, "warn", "8 CPU devices have no"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, {"replicas": 2}, "pass", "flags of XLA"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}, "warn", "a host of a TPU slice"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {"tpu": "local"}, "pass", "on each of which"),
        ({"KERAS_BACKEND": "tensorflow"}, {}, "warn", "what Keras computes with, jax here"),
        ({"KERAS_BACKEND": "jax"}, {}, "pass", "--backend replaces it"),
    ],
)
def test_variables(environ: dict, options: dict, status: str, what: str) -> None:
    [found] = found_by(environment.variables, case(environ=environ, **JAX, **options)).values()
    assert found.status == status and what in found.what
    assert found.remedy or status == "pass"


def test_what_jax_computes_on(tpu_vm: pathlib.Path) -> None:  # noqa: F811
    environ = {"TPU_WORKER_HOSTNAMES": "localhost,127.0.0.1", "TPU_WORKER_ID": "0"}
    examined = case(environ=environ, root=str(tpu_vm), **JAX, tpu="local")
    found = found_by(accelerator.target, examined)
    assert "worker 0 of the 2 in TPU_WORKER_HOSTNAMES" in found["target"].what
    assert accelerator.num_hosts(examined) == 2
    named = case(root=str(tpu_vm), **JAX, tpu="my-tpu")
    with pytest.raises(ConfigError, match="none over the network"):
        list(accelerator.target(named))
    virtual = case(environ={"TF_CONFIG": tf_config([1, 2], 1)}, **JAX, replicas=2, global_batch_size=64)
    [found_batch] = accelerator.batch(virtual)
    assert "64 = 4 x 16 a replica (2 workers of TF_CONFIG)" in found_batch.what


@pytest.mark.slow
def test_jax_computes_or_says_why_not(tmp_path: pathlib.Path) -> None:
    looks = {
        "replicas": Look("computes.computes_jax", {**JAX, "replicas": 3}),
        "tensorflow": Look("computes.computes_jax"),
    }
    found = look(looks, {}, tmp_path, cold=True)
    [replicas], [tensorflow] = (found[name] for name in looks)
    assert replicas.status == "pass" and "computes on 3 CPU device(s)" in replicas.what
    assert tensorflow.status == "skipped"
