"""gRPC and proxies."""

import os
from collections.abc import Sequence


def bypass(hosts: Sequence[str]) -> None:
    """Keeps gRPC from looking for `hosts`, workers and peers, behind http_proxy, where it hangs."""
    # no_grpc_proxy is read by gRPC alone, in place of no_proxy:
    # https://grpc.github.io/grpc/core/md_doc_environment_variables.html
    bypassed = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""
    os.environ["no_grpc_proxy"] = ",".join(filter(None, [bypassed, *hosts]))
