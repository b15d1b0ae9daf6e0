"""What setup.cfg and constraints.txt promise about versions, against what is installed and what really works."""

import configparser
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from trainer.preflight import compiler

ROOT = pathlib.Path(__file__).parents[1]
# What runs on every supported TensorFlow, not only on CI's.
CORE_TESTS = ["tests"]
ON_LINUX_X86 = sys.platform == "linux" and platform.machine() == "x86_64"


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    return parser


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def requirements(*extras: str) -> list[Requirement]:
    """The base requirements, or those of extras, that apply on this machine."""
    cfg = setup_cfg()
    texts = [cfg["options.extras_require"][extra] for extra in extras] or [cfg["options"]["install_requires"]]
    found = [Requirement(line) for text in texts for line in lines(text)]
    return [requirement for requirement in found if requirement.marker is None or requirement.marker.evaluate()]


def constraints() -> dict[str, str]:
    pairs = [line.split("==") for line in lines((ROOT / "constraints.txt").read_text())]
    return {canonicalize_name(name): version for name, version in pairs}


def test_extras_have_their_names():
    assert list(setup_cfg()["options.extras_require"]) == [
        "cpu",
        "gpu",
        "tpu",
        "jax",
        "jax-gpu",
        "jax-tpu",
        "preflight",
        "tune",
        "hub",
        "digits",
        "text",
        "languages",
        "beam",
        "bench",
        "dev",
    ]


def test_libtpu_is_pinned_to_what_imports():
    [pin] = [requirement.specifier for requirement in requirements("tpu") if requirement.name == "libtpu"]
    works = ["0.0.14", "0.0.21", "0.0.24", "0.0.29", "0.0.30", "0.0.31"]
    aborts = ["0.0.32", "0.0.40", "0.0.43.2", "0.0.52"]
    assert list(pin.filter(works + aborts)) == works


def test_preflight_pins_what_its_compiler_was_written_for():
    assert {pin.name: str(pin.specifier) for pin in requirements("preflight")} == {
        name: f"=={version}" for name, version in compiler.VERSIONS.items()
    }


@pytest.mark.parametrize("extra", ["jax", "jax-gpu", "jax-tpu"])
def test_the_jax_that_trains_is_the_jax_that_preflight_compiles_with(extra):
    pins = {pin.name: str(pin.specifier) for pin in requirements(extra)}
    shared = {"jax", "jaxlib"} | ({"libtpu"} if extra == "jax-tpu" else set())
    assert {name: pins[name] for name in shared} == {name: f"=={compiler.VERSIONS[name]}" for name in shared}
    assert pins["tensorflow-cpu"] == next(str(pin.specifier) for pin in requirements("cpu"))


@pytest.mark.parametrize("extra", [None, "cpu", "jax", "jax-tpu", "digits", "dev", "preflight", "tune"])
def test_installed_versions_are_in_the_ranges(extra):
    for requirement in requirements(*[extra] if extra else []):
        version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version), f"{requirement} but {version} is installed"


@pytest.mark.parametrize("extra", [None, "cpu", "tpu", "jax", "jax-tpu", "digits", "dev", "preflight", "tune"])
def test_constraints_pin_every_requirement_within_its_range(extra):
    for requirement in requirements(*[extra] if extra else []):
        if requirement.name == "libtpu":  # tpu and the others need different ones
            assert "libtpu" not in constraints()
            continue
        version = constraints()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} but constraints.txt has {version}"


def test_constraints_hold_one_tensorflow_for_all_extras():
    pins = constraints()
    assert pins["tensorflow"] == pins["tensorflow-cpu"] == pins["tensorflow-tpu"]


def test_makefile_asks_for_the_python_of_setup_cfg():
    low, high = re.findall(r"\((\d+, \d+)\)", (ROOT / "Makefile").read_text())
    bounds = SpecifierSet(f">={low.replace(', ', '.')},<{high.replace(', ', '.')}")
    assert SpecifierSet(setup_cfg()["options"]["python_requires"]) == bounds
    assert bounds.contains(platform.python_version())


def test_cloud_tpu_client_and_tensorboard_start_quietly():
    # Both import pkg_resources: absent from setuptools 82 on, a warning on the console from 80.9 on.
    code = "import cloud_tpu_client, google.api_core.client_info, googleapiclient.discovery, tensorboard.default"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


class Venv:
    """A virtual environment of its own, away from the one that runs this test."""

    def __init__(self, directory: pathlib.Path):
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        self._python = directory / "bin" / "python"

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess:
        """Runs its Python from the root of the project; returns both streams as stdout."""
        # What the outer pytest, or a developer's shell, has set must not reach the inner one.
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
        return subprocess.run(
            [self._python, *args],
            cwd=ROOT,
            env=clean | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def install(self, extras: str, constraints_file: pathlib.Path):
        options = ["--quiet", "--disable-pip-version-check", f"--constraint={constraints_file}"]
        done = self.run("-m", "pip", "install", *options, "--editable", f".[{extras}]")
        assert done.returncode == 0, done.stdout


@pytest.fixture
def venv(tmp_path):
    yield Venv(tmp_path / "venv")
    shutil.rmtree(tmp_path / "venv")  # several GB, which pytest would keep for its last three runs


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not ON_LINUX_X86, reason="tensorflow-tpu has wheels for Linux on x86-64 only")
def test_tpu_extra_installs_and_tensorflow_imports(venv):
    venv.install("tpu", ROOT / "constraints.txt")
    # Without TPU_SKIP_MDS_QUERY the import asks Google Cloud's metadata server, and off Google Cloud waits for minutes.
    done = venv.run("-c", "import tensorflow as tf; print('imported', tf.__version__)", TPU_SKIP_MDS_QUERY="1")
    assert done.returncode == 0, done.stdout  # -6: libtpu has aborted the process
    assert f"imported {constraints()['tensorflow-tpu']}" in done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["2.19.1", "2.21.0"])
def test_core_tests_pass_on_other_tensorflow(venv, tmp_path, version):
    if version == "2.19.1" and sys.version_info >= (3, 13):
        pytest.skip("TensorFlow 2.19 has no wheels for Python 3.13")
    # Only TensorFlow is held: the rest is the newest that goes with it, as for a user without constraints.txt.
    held = tmp_path / "tensorflow.txt"
    held.write_text(f"tensorflow=={version}\ntensorflow-cpu=={version}\n")
    venv.install("cpu,digits,dev,preflight,tune", held)
    # Warnings of other versions are not errors (-W default).
    options = ["-m", "not slow and not nightly", "-W", "default", "-p", "no:cacheprovider", "-q"]
    done = venv.run("-m", "pytest", *options, *CORE_TESTS)
    assert done.returncode == 0, done.stdout
    print(done.stdout)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_extra_hub_works_beside_our_tensorflow(venv):
    venv.install("cpu,digits,dev,hub", ROOT / "constraints.txt")
    hub = re.search(r"pip install --no-deps '(keras-hub[^']*)'", (ROOT / "setup.cfg").read_text())[1]
    done = venv.run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", hub)
    assert done.returncode == 0, done.stdout
    done = venv.run("-m", "pytest", "-W", "default", "-p", "no:cacheprovider", "-q", "-rs", "tests/test_keras_hub.py")
    assert done.returncode == 0, done.stdout
    assert "the extra hub is not installed" not in done.stdout
