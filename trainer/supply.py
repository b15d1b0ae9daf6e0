"""From where training is supplied, as `--data_service` and `--cache` say: other machines, or copies of the shards.

Both are looked at when nothing else can be refused any more, and before hardware is used.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence

from data import cache, service
from trainer import logs
from trainer.config import Config
from trainer.errors import EXIT_RETRY, RetryError

_log = logging.getLogger(__name__)


def services(config: Config) -> tuple[str, ...]:
    """Addresses of the machines that compute batches, for `service.read`; none without `data_service`.

    Raises:
        DataError: what is no address.
        RetryError: a machine that does not answer.
    """
    if config.data_service is None:
        return ()
    addresses = service.parse(config.data_service)
    with _retried():
        service.check(addresses)
    return addresses


def copies(config: Config, shards: Sequence[str]) -> Mapping[str, str]:
    """Path of each shard -> path of its copy, made here and now; empty without `cache`.

    Raises:
        DataError: what does not fit, or has no effect.
    """
    if config.cache == "memory":
        return cache.to_memory(shards, _log.info)
    if config.cache == "disk" and config.cache_dir is not None:
        return cache.to_disk(shards, config.cache_dir, _log.info)
    return {}


@contextlib.contextmanager
def watched(addresses: Sequence[str], *, grace_secs: float) -> Iterator[None]:
    """Ends the run where a machine is lost. Delete iterators within (`service.watched`).

    Raises:
        RetryError: a machine forgot the run. Where one is gone, the process ends with the same exit code.
    """
    if not addresses:
        yield
        return
    with _retried(), service.watched(addresses, _end_process, grace_secs=grace_secs):
        yield


@contextlib.contextmanager
def _retried() -> Iterator[None]:
    try:
        yield
    except service.ServiceLostError as error:
        raise RetryError(str(error)) from error


def _end_process(message: str) -> None:
    # Called in a thread: the main one waits in C++, where no exception reaches it.
    logs.write_last_words(message, EXIT_RETRY)
    os._exit(EXIT_RETRY)
