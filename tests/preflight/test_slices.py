import pytest

from trainer.errors import ConfigError
from trainer.preflight import slices


@pytest.mark.parametrize(
    "name, topology, num_chips, num_replicas, num_hosts",
    [
        ("v2-8", "v2:2x2", 4, 8, 1),  # Cloud counts TensorCores: two a chip, each a replica
        ("v3-32", "v3:4x4", 16, 32, 4),
        ("v4-8", "v4:2x2x1", 4, 4, 1),  # TensorCores again, but both of a chip are one replica
        ("v4-16", "v4:2x2x2", 8, 8, 2),
        ("v5p-8", "v5p:2x2x1", 4, 4, 1),
        ("v5litepod-16", "v5e:4x4", 16, 16, 4),  # chips from here on
        ("v5e-1", "v5e:1x1", 1, 1, 1),
        ("v5e-4", "v5e:2x2", 4, 4, 1),
        ("v6e-8", "v6e:2x4", 8, 8, 1),
        ("tpu7x-8", "tpu7x:2x2x1", 4, 8, 1),
        ("v5e:2x4", "v5e:2x4", 8, 8, 1),
        ("v5e:4x2", "v5e:4x2", 8, 8, 1),
        ("v4:4x4x12", "v4:4x4x12", 192, 192, 48),  # Cloud has it by topology only
    ],
)
def test_names_of_cloud_and_topologies(name, topology, num_chips, num_replicas, num_hosts):
    found = slices.parse(name)
    assert found.name == name
    assert (found.topology, found.num_chips) == (topology, num_chips)
    assert (found.num_replicas, found.num_hosts) == (num_replicas, num_hosts)


@pytest.mark.parametrize(
    "name, says",
    [
        ("v5e-6", "did you mean 'v5e-4'?"),
        ("v3-4", "did you mean 'v3-8'?"),
        ("v5litepod-9", "did you mean 'v5e-8'?"),
        ("v5e8", "did you mean 'v5e-8'?"),
        ("v5lite-8", "did you mean 'v5e-8'?"),
        ("TPU", "Use a name such as v3-8"),
        ("", "Use a name such as v3-8"),
        ("v5e:2x2x2", "along each of 2 axes"),
        ("v4:2x2", "along each of 3 axes"),
        ("v5e:3x3", "the first two even"),
        ("v5e:0x2", "the first two even"),
        ("v5e:16x32", "up to 16x16"),
    ],
)
def test_other_names_are_refused_with_the_nearest(name, says):
    with pytest.raises(ConfigError) as error:
        slices.parse(name)
    assert says in str(error.value) and f"--slice={name}" in str(error.value)


def test_common_slices_are_those_whose_replicas_share_the_batch():
    def common(batch: int) -> list[str]:
        return [target.name for target in slices.common(batch, "tensorflow")]

    assert common(12) == ["v4-8", "v5e-1", "v5e-4", "v5p-8", "v6e-1", "v6e-4"]
    assert {"v3-32", "v5e-16", "v6e-16"} < set(common(1024))


def test_common_slices_are_those_that_the_backend_runs_on():
    of_tensorflow, of_jax = (slices.common(1024, backend) for backend in ("tensorflow", "jax"))
    assert [target.name for target in of_jax if target not in of_tensorflow] == ["tpu7x-8"]
    assert set(map(str, of_tensorflow)) < set(map(str, of_jax))
