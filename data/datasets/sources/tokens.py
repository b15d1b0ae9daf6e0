"""Records of tokens: texts packed for a language model, or one text each for a classifier.

A record of a language model is S positions. `tokens` is what stands there, `segments` in which of the record's
documents (1, 2, ..., and 0 where there is none), `targets` the token that comes next (-1 where there is none). The
token that ends a text also begins it, as input of the first prediction: text t1 t2 t3 is

    tokens    end t1  t2  t3
    targets   t1  t2  t3  end

A text of more than S positions is cut into pieces; the target of a piece's last position is the first token of the
next, so each token of a text is predicted exactly once. A piece begins without what came before it.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from data import errors, packing
from data.tokenizer import PADDING, Tokenizer

TOKENS, SEGMENTS, TARGETS, LABEL = "tokens", "segments", "targets", "label"
PACKED_KEYS = ((TOKENS, SEGMENTS), TARGETS)
CLASSIFIED_KEYS = (TOKENS, LABEL)
NO_TARGET = -1


@dataclasses.dataclass(frozen=True)
class Layout:
    """Records of S = `sequence_length` tokens, each id in [0, vocabulary)."""

    sequence_length: int
    vocabulary: int

    def packed_features(self) -> dict[str, Any]:
        """The features of `packed`."""
        return {
            TOKENS: self._integers(0, self.vocabulary, "Token ids."),
            SEGMENTS: self._integers(0, self.sequence_length + 1, "Which document, from 1; 0: none."),
            TARGETS: self._integers(NO_TARGET, self.vocabulary, "Id of the next token; -1: there is none."),
        }

    def classified_features(self, classes: Sequence[str]) -> dict[str, Any]:
        """The features of `classified`."""
        return {
            TOKENS: self._integers(0, self.vocabulary, "Token ids; 0: padding."),
            LABEL: tfds.features.ClassLabel(names=list(classes)),
        }

    def packed(self, documents: Iterable[np.ndarray], end: int) -> Iterator[dict[str, np.ndarray]]:
        """Records of documents, of each the ids [n]; `end` is the id that stands between texts.

        Yields:
          tokens, segments and targets, [S] each.
        """
        pieces = [piece for ids in documents for piece in self._pieces(ids, end)]
        for chosen in packing.best_fit([len(tokens) for tokens, _ in pieces], self.sequence_length):
            tokens = np.full(self.sequence_length, PADDING, _smallest(self.vocabulary))
            segments = np.zeros(self.sequence_length, _smallest(self.sequence_length + 1))
            targets = np.full(self.sequence_length, NO_TARGET, _smallest(self.vocabulary))
            begin = 0
            for number, piece in enumerate(chosen, start=1):
                place = slice(begin, begin + len(pieces[piece][0]))
                (tokens[place], targets[place]), segments[place] = pieces[piece], number
                begin = place.stop
            yield {TOKENS: tokens, SEGMENTS: segments, TARGETS: targets}

    def classified(self, ids: np.ndarray, name: str) -> dict[str, Any]:
        """The record of a text with a class: its first S tokens, or all and then 0."""
        tokens = np.full(self.sequence_length, PADDING, _smallest(self.vocabulary))
        tokens[: len(ids)] = ids[: self.sequence_length]
        return {TOKENS: tokens, LABEL: name}

    def _pieces(self, ids: np.ndarray, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, targets) of each S positions of a text."""
        tokens, targets = np.concatenate([[end], ids]), np.concatenate([ids, [end]])
        for begin in range(0, len(tokens), self.sequence_length):
            place = slice(begin, begin + self.sequence_length)
            yield tokens[place], targets[place]

    def _integers(self, low: int, below: int, words: str) -> Any:
        """[S] whole numbers in [low, below); the range stays with the dataset, where data/parse.py reads it."""
        return tfds.features.Tensor(
            shape=(self.sequence_length,),
            dtype=_smallest(below),
            encoding=tfds.features.Encoding.BYTES,
            doc=tfds.features.Documentation(desc=words, value_range=f"[{low}, {below})"),
        )


def _smallest(below: int) -> type[np.integer]:
    """The type of token ids below a number, and of -1."""
    return np.int16 if below - 1 <= np.iinfo(np.int16).max else np.int32


def check(tokenizer: Tokenizer, name: str, *, packs: bool) -> None:
    """Raises DataError for a tokenizer without the special token that such records need."""
    if packs and tokenizer.end is None:
        raise errors.DataError(
            f"The tokenizer {name} has no token for the end of a text, which a language model needs. Train it with "
            "--eos_id=1."
        )
    if not packs and not tokenizer.pads:
        raise errors.DataError(
            f"Token {PADDING} of the tokenizer {name} is not padding, so that padding could not be told from text. "
            f"Train it with --pad_id={PADDING}."
        )


def fill(examples: Iterable[dict[str, np.ndarray]]) -> float:
    """Which share of the positions of some records holds a token."""
    rows = [example[SEGMENTS] if SEGMENTS in example else example[TOKENS] for example in examples]
    return float(np.mean(np.stack(rows) != 0))
