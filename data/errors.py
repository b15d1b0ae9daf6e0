"""The errors that data raises for what its user can mend, or wait for."""


class DataError(ValueError):
    """A dataset that is missing, empty, damaged or of the wrong shape.

    The message says what is wrong, what was received and what to do; a retry without a change cannot help.
    """


class StorageError(OSError):
    """Storage did not answer, or has no room: the same command may succeed later."""
