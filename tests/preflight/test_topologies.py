"""Asks libtpu about every slice that we have a name for, and about the memory of every chip."""

import json
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.preflight.conftest import GUARD_SECS, lower
from trainer.preflight import slices

ROOT = pathlib.Path(__file__).parents[2]
# Prints [devices, hosts] of each slice named on the command line.
ASK = """
import argparse, json, sys
from trainer.preflight import compiler, slices

compiler._set_environment()
get_topology_desc = compiler._private_names()["get_topology_desc"]
found = []
for target in map(slices.parse, sys.argv[1:]):
    args = argparse.Namespace(
        topology=target.topology,
        host_bounds=",".join(map(str, target.host_bounds)),
        chip_config=target.chip.chip_config,
        num_replicas=target.num_replicas,
    )
    devices = compiler._devices(get_topology_desc, args)
    found.append([len(devices), len({device.process_index for device in devices})])
print(json.dumps(found))
"""


def test_libtpu_knows_every_slice_with_as_many_replicas_and_hosts():
    targets = [
        slices.parse(f"{chip.name}:{topology}") for chip in slices.CHIPS.values() for topology in chip.topologies
    ]
    done = subprocess.run(
        [sys.executable, "-c", ASK, *(target.topology for target in targets)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GUARD_SECS,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[target.num_replicas, target.num_hosts] for target in targets]


@pytest.mark.parametrize("chip", slices.CHIPS)
def test_libtpu_lets_a_program_fill_as_much_memory_as_we_say(compiler, chip):
    target = slices.parse(f"{chip}:{slices.CHIPS[chip].topologies[0]}")
    too_large = lower(lambda x: 2 * x, tf.TensorSpec((100, 1024, 1024, 256)))
    result = compiler.compile(too_large, target)
    assert (result.kind, result.available_bytes) == ("oom", target.chip.hbm_bytes)
