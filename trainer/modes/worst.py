"""`examples.json`: what a trained classifier takes for what, by a pass over the first examples of `eval_split`."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from data import naming
from trainer import diagnose, examples, inputs, run_dir
from trainer.assembly import Assembly

_log = logging.getLogger(__name__)


def write_examples(run: Assembly, step: int, goes_on: Callable[[], bool] = lambda: True) -> None:
    """Looks at `report_examples` examples with the weights as they are; all workers call it together.

    It counts as evaluation, and is less work than one. Nothing is written of data that is made up, and where no class
    is learned or the model does not tell which. Of several workers the chief tells of the examples that it sees. A
    failure is a warning: all that counts of the run is there already.

    Args:
        run: with the weights of `step`.
        step: for the file.
        goes_on: asked before each batch; once it says no, to any worker, nothing is written.
    """
    look = _Look(run)
    with run.clock.measure("evaluation"), run.replicated.averaged() if look.wants_more else contextlib.nullcontext():
        # Together: within a step the devices of several workers may wait for each other.
        while run.devices.agree([int(not (look.wants_more and goes_on()))])[0] == 0:
            look.at_next_batch()
    if run.devices.is_chief and not look.wants_more:
        look.write(step)


class _Look:
    """The pass of one worker; it ends, with a warning, where anything fails."""

    def __init__(self, run: Assembly):
        self._run = run
        self._dataset = run.inputs.dataset if isinstance(run.inputs, inputs.Inputs) else None  # else it is made up
        self._from_logits = examples.reads_logits(run.replicated.model.loss)
        is_wanted = self._dataset is not None and self._from_logits is not None
        self._limit = min(run.config.report_examples, run.inputs.num_eval_examples) if is_wanted else 0
        self._batches: Iterator | None = None
        self._done = 0  # batches
        self._found: examples.Examples | None = None

    @property
    def wants_more(self) -> bool:
        """Whether there is something left to look at."""
        return self._done * self._run.plan.global_batch_size < self._limit

    def at_next_batch(self) -> None:
        """Looks at a batch."""
        with self._warning():
            if self._batches is None:
                self._batches = iter(self._run.eval_batches)
            x, y, mask = next(self._batches)
            outputs = self._run.replicated.engine.predict(x)  # of each replica of this worker
            if self._found is None:
                self._found = self._begin(outputs[0])
            if self._found is not None:
                self._add(self._found, x, y, mask, outputs)
            self._done += 1

    def write(self, step: int) -> None:
        """Writes down what was seen."""
        with self._warning():
            total = self._run.inputs.num_eval_examples
            text = self._found and self._found.document(step=step, split=self._run.config.eval_split, total=total)
            if text:
                self._run.folder.replace(run_dir.EXAMPLES, text)

    def _begin(self, outputs: list[np.ndarray]) -> examples.Examples | None:
        """What takes in examples; none where such outputs are of no use."""
        run, spec = self._run, self._run.spec
        num_classes = examples.num_classes(spec, outputs)
        if not num_classes or self._dataset is None:
            self._limit = 0
            return None
        names = naming.of(self._dataset, run.config.eval_split, run.config.image_size)
        return examples.Examples(
            spec, names, num_classes=num_classes, from_logits=bool(self._from_logits), limit=self._limit
        )

    def _add(self, found: examples.Examples, x: Any, y: Any, mask: Any, outputs: list[list[np.ndarray]]) -> None:
        plan, devices = self._run.plan, self._run.devices
        rows = plan.per_replica_batch_size
        first = self._done * plan.global_batch_size + devices.worker_index * len(outputs) * rows
        for replica, (labels, is_real, [of_replica]) in enumerate(
            zip(devices.local(y), devices.local(mask), outputs, strict=True)
        ):
            share = keras.tree.map_structure(lambda leaf, replica=replica: devices.local(leaf)[replica], x)
            found.add(first + replica * rows, np.asarray(labels), np.asarray(is_real), of_replica, _Rows(share))

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, the run is none the worse
            self._limit, self._found = 0, None
            _log.warning("%s is not written: %s", run_dir.EXAMPLES, diagnose.short(error))


class _Rows:
    """From a row to the input of an example, as arrays of their own. What nobody asks for stays on the device."""

    def __init__(self, share: Any):
        self._share, self._is_here = share, False

    def __call__(self, row: int) -> Any:
        if not self._is_here:
            self._share, self._is_here = keras.tree.map_structure(np.asarray, self._share), True
        return keras.tree.map_structure(lambda array: np.array(array[row]), self._share)
