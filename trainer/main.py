"""`python -m trainer.main`: flags -> config -> experiment. TensorFlow is imported once the config is valid."""

import contextlib
import logging
import os
import sys
import time

from data import catalog
from trainer import backend, config, diagnose, errors, flags, logs, memory, progress, terminal
from trainer.doctor import packages
from trainer.redact import redact
from trainer.watch import stopping

_log = logging.getLogger("trainer.main")  # __name__ is __main__


def main(argv: list[str], stops: stopping.Stops) -> int:
    """Runs what `argv` (program name first) asks for and returns an exit code of `errors`."""
    started = time.monotonic()
    command = flags.parse(argv, os.environ, _read)
    if command.help:
        print(flags.help_text())
        return errors.EXIT_OK
    layers = flags.layers(command, os.environ, _read)
    settings = flags.merge(layers)
    if command.print_config:
        print(config.to_json(settings), end="")
        return errors.EXIT_OK
    logs.configure(settings.log_format, redact=redact, quiet=settings.quiet)
    if settings.log_format == "text" and not settings.quiet:
        doing = "doctor" if settings.mode == "doctor" else "starting"
        terminal.begin(lambda columns: progress.live(columns, f"{doing} {_since(started)}"))
    if os.environ.get("KERAS_BACKEND", settings.backend) != settings.backend:
        _log.warning(
            "KERAS_BACKEND=%s has no effect: --backend says what Keras computes with, %s here",
            os.environ["KERAS_BACKEND"],
            settings.backend,
        )
    backend.choose(settings.backend)
    if settings.mode == "doctor":
        stops.when = "during the check-up"
        from trainer.doctor import checkup

        return checkup.run(settings)
    if settings.mode == "report":
        return _report(settings, stops)
    catalog.check_local(settings.dataset, settings.data_dir)
    packages.check_packages(wants_tpu=settings.tpu is not None, backend=settings.backend)
    packages.quieten_libraries(for_machines=settings.log_format == "json")
    with memory.importing():
        from trainer import experiment

    experiment.run(settings, flags.origins(layers), argv, started, stops)
    return errors.EXIT_OK


def _report(settings: config.Config, stops: stopping.Stops) -> int:
    stops.when = "before the report was written"
    packages.quieten_libraries(for_machines=settings.log_format == "json")
    from trainer.modes import report

    return report.report(settings)


def _since(started: float) -> str:
    return progress.duration(time.monotonic() - started)


def _read(path: str) -> str:
    """The text of a config file; only one that is not on this machine takes TensorFlow."""
    if "://" not in path:
        return config.read_local(path)
    packages.quieten_libraries(for_machines=logs.wanted_format(sys.argv) == "json")
    from trainer import storage

    return storage.read_text(path)


def _main() -> int:
    memory.share_arenas()
    stops = stopping.install()
    logs.configure(logs.wanted_format(sys.argv), redact=redact)
    try:
        return main(sys.argv, stops)
    except BaseException as error:  # sys.exit() of a model's code must not pass for the end of a run
        stops.settle()
        return diagnose.report(error, redact)
    finally:
        terminal.leave()


if __name__ == "__main__":
    code = _main()
    with contextlib.suppress(OSError):  # a full disk under the log must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    # A thread that still waits for a TPU that never answered must not keep the process alive.
    os._exit(code) if code else sys.exit(code)
