"""Says which private name of JAX' coordination has moved, when a version changes; test_jax_cluster.py uses them."""

import re

import jax
import pytest
from jax._src import distributed
from jaxlib import _jax


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("get_distributed_runtime_service", ["address", "num_nodes", "heartbeat_timeout", "shutdown_timeout"]),
        (
            "get_distributed_runtime_client",
            ["address", "node_id", "init_timeout", "shutdown_timeout", "heartbeat_timeout", "use_compression"],
        ),
    ],
)
def test_jaxlib_takes_what_we_give(function: str, arguments: list[str]) -> None:
    told = getattr(_jax, function).__doc__
    assert [name for name in arguments if not re.search(rf"\b{name}: (int|str|bool)", told)] == [], (
        f"jax {jax.__version__} changed {function}: see trainer/backends/jax/coordinator.py"
    )


def test_jax_finds_its_client_where_we_put_it() -> None:
    state = distributed.State()
    for name in ("client", "service", "coordinator_address", "process_id", "num_processes"):
        assert hasattr(state, name), f"jax {jax.__version__} has no {name}: see trainer/backends/jax/coordinator.py"
    assert isinstance(distributed.global_state, distributed.State)
