"""Worker processes that take tasks no faster than they work them off, and do not outlive the process they work for."""

import concurrent.futures
import concurrent.futures.process
import itertools
import multiprocessing
import multiprocessing.process
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from data import errors

# Up to so many tasks are done before worker processes would have imported TensorFlow.
TASKS_WITHOUT_WORKERS = 4
# Tasks handed out for each worker: one in work, one waiting.
_TASKS_AHEAD = 2


class Workers:
    """Runs functions in processes; a few calls alone run here, before processes would have started.

    count: processes.
    module: imported once, in the server that workers are forked from, because importing TensorFlow takes seconds.
    start, argument: called once in each process, and here.
    """

    def __init__(self, count: int, module: str, start: Callable[[Any], None], argument: Any):
        self._count = count
        self._module = module
        self._start = start
        self._argument = argument
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        self._start(self._argument)
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable, calls: Iterator[tuple]) -> Iterator[Any]:
        """Results in the order in which they are ready; takes calls no faster than they are worked off.

        Raises:
          DataError: a process was killed.
        """
        first = list(itertools.islice(calls, TASKS_WITHOUT_WORKERS + 1))
        calls = itertools.chain(first, calls)
        if self._pool is None and (self._count == 1 or len(first) <= TASKS_WITHOUT_WORKERS):
            yield from itertools.starmap(function, calls)
            return
        self._pool = self._pool or self._make_pool()
        waiting: set[concurrent.futures.Future] = set()
        try:
            for call in calls:
                waiting.add(self._pool.submit(function, *call))
                if len(waiting) >= _TASKS_AHEAD * self._count:
                    ready, waiting = concurrent.futures.wait(waiting, return_when="FIRST_COMPLETED")
                    yield from (future.result() for future in ready)
            yield from (future.result() for future in concurrent.futures.as_completed(waiting))
        except concurrent.futures.process.BrokenProcessPool as error:
            raise errors.DataError(
                "A worker process was killed, which happens where memory runs out. "
                f"Try fewer than {self._count}: --workers={max(1, self._count // 2)}."
            ) from error

    def _make_pool(self) -> concurrent.futures.ProcessPoolExecutor:
        # Not forked from this process: with its threads, that may deadlock.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self._module])
        return concurrent.futures.ProcessPoolExecutor(self._count, context, _begin, (self._start, self._argument))


def _begin(start: Callable[[Any], None], argument: Any) -> None:
    """What a worker begins with: it ends with the process that it works for, even if that is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    start(argument)


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
