"""`python -m trainer.main`: flags -> config -> experiment. TensorFlow is imported once the config is valid."""

import os
import sys
import time

from data import catalog
from data.errors import DataError
from trainer import config, doctor, errors, flags


def main(argv: list[str]) -> int:
    """Runs what `argv` (program name first) asks for and returns an exit code of `errors`."""
    started = time.monotonic()
    command = flags.parse(argv)
    if command.help:
        print(flags.help_text())
        return errors.EXIT_OK
    settings = flags.resolve(command)
    if command.print_config:
        print(config.to_json(settings), end="")
        return errors.EXIT_OK
    catalog.check_local(settings.dataset, settings.data_dir)
    doctor.check_packages(wants_tpu=settings.tpu is not None)
    doctor.quieten_libraries()
    from trainer import experiment

    experiment.run(settings, argv, started)
    return errors.EXIT_OK


def _main() -> int:
    try:
        return main(sys.argv)
    except (errors.TrainerError, DataError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return getattr(error, "exit_code", errors.EXIT_CONFIG)
    except KeyboardInterrupt:
        print("trainer: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return errors.EXIT_RETRY


if __name__ == "__main__":
    code = _main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that still waits for a TPU that never answered must not keep the process alive.
    os._exit(code) if code else sys.exit(code)
