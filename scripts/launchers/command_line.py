"""The command line of `scripts/launch`, and how it ends: exit codes and one clear line, as the trainer's."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from scripts.launchers import job as job_lib
from scripts.launchers.actions import Actions, say
from scripts.launchers.job import Job
from trainer.errors import EXIT_OK, TrainerError

_INTERRUPTED = 130  # what a shell gives for SIGINT


class Launcher(Protocol):
    """What a platform's file has.

    FILLED: options of the trainer that the platform fills where nobody gave them.
    """

    FILLED: tuple[str, ...]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the platform."""

    def launch(self, job: Job, options: argparse.Namespace, actions: Actions) -> None:
        """Writes and runs what starts `job`."""


LAUNCHERS = {
    "tpu-vm": "a Cloud TPU VM or pod: created or queued, installed, run, supervised, fetched from, deleted",
    "vertex": "Vertex AI: custom job, hyperparameter tuning job, or schedule",
    "k8s": "Kubernetes: Job, CronJob or JobSet, on GKE's TPU node pools too",
    "cron": "this machine, on a schedule: a crontab line, or a systemd service and timer",
}
_EPILOG = """What follows a lone -- are flags of the trainer, over those of --config:

  scripts/launch cron --name=digits --config=run.toml --schedule='30 3 * * *' -- --train_epochs=5

Nothing is changed anywhere without --submit: files and commands are printed, to be read and copied."""


def main(argv: Sequence[str]) -> int:
    """Does what `argv` asks for and returns an exit code of `trainer.errors`."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    launcher = _launcher(options.platform)
    try:
        job = job_lib.load(options.name, options.config, words[at + 1 :], given=launcher.FILLED)
        launcher.launch(job, options, Actions(submit=options.submit, out=options.out))
    except TrainerError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; what has been submitted stays")
        return _INTERRUPTED
    return EXIT_OK


def _launcher(platform: str) -> Launcher:
    return cast(Launcher, importlib.import_module(f"scripts.launchers.{platform.replace('-', '_')}"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/launch",
        description="Starts the trainer somewhere, from the config file that the trainer takes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    platforms = parser.add_subparsers(dest="platform", required=True, metavar="PLATFORM")
    for name, summary in LAUNCHERS.items():
        one = platforms.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=_EPILOG,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        group = one.add_argument_group("every platform")
        group.add_argument("--name", required=True, help="name of the job: lower-case letters, digits, dashes")
        group.add_argument("--config", help="the trainer's config file, .toml or .json")
        group.add_argument("--out", help="directory for the files; without it they are printed")
        how = group.add_mutually_exclusive_group()
        how.add_argument("--dry_run", action="store_true", default=True, help="print or write only (the default)")
        how.add_argument("--submit", action="store_true", help="run the commands that a dry run prints")
        _launcher(name).add_arguments(one)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
