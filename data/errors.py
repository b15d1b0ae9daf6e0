"""The error that data raises for what its user can mend."""


class DataError(ValueError):
    """A dataset that is missing, empty, damaged or of the wrong shape.

    The message says what is wrong, what was received and what to do; a retry without a change cannot help.
    """
