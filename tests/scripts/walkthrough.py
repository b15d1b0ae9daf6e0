"""The commands that scripts/README.md tells its readers to type, and the files that it shows."""

import pathlib
import re

_README = pathlib.Path(__file__).parent.parent.parent / "scripts" / "README.md"
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"`([\w.]+)`:\n```toml\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands(beginning: str) -> list[str]:
    """The lines of its fenced blocks that begin so, in their order, each in one piece."""
    blocks = "".join(_BLOCK.findall(_README.read_text())).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if line.startswith(beginning)]


def file(name: str) -> str:
    """The content of a file that it shows."""
    return dict(_FILE.findall(_README.read_text()))[name]
