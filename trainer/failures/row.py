"""One known failure."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Failure:
    """A row of the table.

    Attributes:
        name: for tests and for talking about it.
        kinds: names of exception types, of which the error is one; empty for any. `OpError` is any of TensorFlow's.
        pattern: regular expression that is found in the error's text; empty for any text.
        cause: what is wrong, as a clause.
        remedy: what to do, as sentences without the last full stop.
        example: text that it was seen with.
        source: where it was seen: owner/repo#number of GitHub, or "here".
        retryable: whether the same command can succeed later.
    """

    name: str
    kinds: tuple[str, ...]
    pattern: str
    cause: str
    remedy: str
    example: str
    source: str
    retryable: bool = False
