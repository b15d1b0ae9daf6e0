"""Errors that end a run, each with the exit code that tells a scheduler what to do next.

Codes: 0 finished, 2 usage, 75 stopped early and worth another try, 78 nothing a retry can mend, 1 a defect of ours.
75 and 78 are EX_TEMPFAIL and EX_CONFIG of sysexits.h.
"""

EXIT_OK = 0
EXIT_DEFECT = 1
EXIT_USAGE = 2
EXIT_RETRY = 75
EXIT_CONFIG = 78


class TrainerError(Exception):
    """Base of the errors whose message is written for the user: what is wrong, what was received, what to do."""

    exit_code = EXIT_DEFECT


class UsageError(TrainerError, ValueError):
    """The command line itself is malformed: an unknown flag, a positional argument, a value that does not parse."""

    exit_code = EXIT_USAGE


class ConfigError(TrainerError, ValueError):
    """Configuration, data or environment that the same command would meet again."""

    exit_code = EXIT_CONFIG


class RetryError(TrainerError, RuntimeError):
    """The run stopped early; the same command may succeed later (worker lost, TPU not ready, preempted)."""

    exit_code = EXIT_RETRY
