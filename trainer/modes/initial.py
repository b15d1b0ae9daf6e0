"""The weights that a run begins with where they are not as initialised."""

import logging

from trainer import patterns, replicated
from trainer.assembly import Assembly
from trainer.checkpoints import store, weights

_log = logging.getLogger(__name__)


def load_weights(run: Assembly, path: str) -> None:
    """Takes the weights of the run or checkpoint at `path`, averaged ones where it has them, but for `init_fresh`.

    Raises:
        ConfigError: there are none, or they do not fit; names all that do not.
    """
    saved = store.load(path, only=(replicated.MODEL, replicated.AVERAGES))
    unchosen = patterns.split(run.config.init_fresh)
    wanted = run.replicated.signature()
    found = replicated.as_counted(replicated.best_weights(saved.arrays), wanted)
    chosen, fresh = weights.choose_weights(found, wanted, unchosen)
    run.replicated.load_state(chosen)
    left = f"; as initialised: {', '.join(name.removeprefix('model/') for name in fresh)}" if fresh else ""
    _log.info("weights of %s, step %s%s", saved.path, f"{saved.step:,}", left)
