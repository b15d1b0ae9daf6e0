"""Devices of this machine, for tests that need some in their own process."""

from trainer import cluster, hardware


def one_replica() -> cluster.Cluster:
    """This machine's CPU."""
    return cluster.connect(hardware.resolve(tpu=None, environ={}), connect_timeout_secs=60)
