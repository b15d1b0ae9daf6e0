"""From text to token ids: UTF-8 bytes, or a SentencePiece model."""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from etils import epath

from data import errors

BYTES = "bytes"
SUFFIX = ".model"
_FILE = f"tokenizer{SUFFIX}"  # beside a dataset
# Stands where there is no token. No tokenizer may give it to text that is padded.
PADDING = 0
# As ByT5 lays them out (Xue et al. 2021, arXiv:2105.13626): 0 padding, 1 end of a text, 2 unknown, then the bytes.
_END, _FIRST_BYTE, _NUM_BYTES = 1, 3, 256


class Tokenizer(Protocol):
    """vocabulary: each id is in [0, vocabulary); end: the id behind a text; pads: no text holds the id `PADDING`.

    files: name -> content of what is kept beside a dataset, so that its ids can be read.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def end(self) -> int | None: ...

    @property
    def pads(self) -> bool: ...

    @property
    def files(self) -> Mapping[str, bytes]: ...

    def encode(self, text: str) -> np.ndarray:
        """[n] int32."""

    def decode(self, ids: np.ndarray) -> str:
        """The text of [n] ids; special ones say nothing."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Each byte of a text's UTF-8 is a token, its value plus 3. Needs no file, and no text is unknown to it."""

    vocabulary: int = _FIRST_BYTE + _NUM_BYTES
    end: int = _END
    pads: bool = True
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def encode(self, text: str) -> np.ndarray:
        """[n] int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + _FIRST_BYTE

    def decode(self, ids: np.ndarray) -> str:
        """The text of [n] ids; a character that is cut becomes U+FFFD."""
        return (ids[ids >= _FIRST_BYTE] - _FIRST_BYTE).astype(np.uint8).tobytes().decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class SentencePiece:
    """A SentencePiece model (Kudo and Richardson 2018, arXiv:1808.06226), which knows its own end and padding.

    model: content of the .model file. Travels to worker processes, which read it once each.
    """

    model: bytes

    @functools.cached_property
    def _processor(self) -> Any:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=self.model)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model}

    @property
    def vocabulary(self) -> int:
        return int(self._processor.vocab_size())

    @property
    def end(self) -> int | None:
        end = int(self._processor.eos_id())
        return end if end >= 0 else None

    @property
    def pads(self) -> bool:
        return int(self._processor.pad_id()) == PADDING

    @property
    def files(self) -> Mapping[str, bytes]:
        return {_FILE: self.model}

    def encode(self, text: str) -> np.ndarray:
        """[n] int32."""
        return np.array(self._processor.encode(text), np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The text of [n] ids."""
        return str(self._processor.decode([int(token) for token in ids]))


def load(name: str) -> Tokenizer:
    """The tokenizer called `bytes`, or that of a SentencePiece file.

    Raises:
      DataError: no such file, another kind of file, or sentencepiece is not installed.
    """
    if name == BYTES:
        return Bytes()
    if not name.endswith(SUFFIX) or not epath.Path(name).exists():
        raise errors.DataError(
            f"A tokenizer is {BYTES!r} or the path of a SentencePiece model (FILE{SUFFIX}). Received: {name!r}."
        )
    if importlib.util.find_spec("sentencepiece") is None:
        raise errors.DataError(f"{name} needs SentencePiece, which is not installed. Install it: pip install '.[text]'")
    tokenizer = SentencePiece(epath.Path(name).read_bytes())
    try:
        tokenizer.encode("")  # reads the file
    except RuntimeError as error:
        raise errors.DataError(f"{name} does not read as a SentencePiece model: {error}. Mend it.") from error
    return tokenizer


def beside(directory: str, vocabulary: int) -> Tokenizer | None:
    """The tokenizer that made a dataset's tokens, as far as its files tell; None where it cannot be told or read."""
    path = epath.Path(directory) / _FILE
    if path.exists():
        return load(str(path)) if importlib.util.find_spec("sentencepiece") else None
    return Bytes() if vocabulary == Bytes.vocabulary else None
