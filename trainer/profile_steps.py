"""What `--profile_steps` takes. Apart, so that the config can check it without importing TensorFlow."""


def parse_profile_steps(text: str) -> tuple[int, int]:
    """`A,B` -> (A, B): profile from when A steps are done until B are, that is steps A, ..., B - 1.

    Raises:
        ValueError: says what was received.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() and part.isascii() for part in parts):
        raise ValueError(f"profile_steps takes two whole numbers, first,end such as 100,110. Received: {text!r}")
    first, end = int(parts[0]), int(parts[1])
    if first >= end:
        raise ValueError(
            f"profile_steps profiles steps first, ..., end - 1, so end must be greater. Received: {text!r}"
        )
    return first, end
