"""docstrings: what scikit-learn says of its functions and classes, for a language model. Nothing is downloaded.

A document is a docstring; those of the test split are of other files than those of training.

Source: scikit-learn (https://scikit-learn.org, BSD-3-Clause), as it is installed; its files are read, not run.
"""

import ast
import hashlib
import importlib.util
import inspect
import pathlib
from collections.abc import Iterator

import tensorflow_datasets as tfds
from etils import epath

from data import errors, tokenizer
from data.datasets.sources import tokens

NUM_SHARDS = 4
_BYTES = tokenizer.Bytes()
_LAYOUT = tokens.Layout(sequence_length=128, vocabulary=_BYTES.vocabulary)
_LEAST_CHARACTERS = 200  # shorter ones are a name and "Not used, present for API consistency."
_TEST_ONE_IN = 10
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


class Docstrings(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Writes packed records of 128 bytes (see sources/tokens.py) in splits train and test."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    code_path = epath.Path(__file__)  # as in digits.py

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Docstrings of scikit-learn, as UTF-8 bytes.",
            homepage="https://scikit-learn.org",
            features=tfds.features.FeaturesDict(_LAYOUT.packed_features()),
            supervised_keys=tokens.PACKED_KEYS,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        del dl_manager  # nothing to download
        documents = load()
        return {split: self._generate_examples(documents[split]) for split in ("train", "test")}

    def _generate_examples(self, documents: list[str]) -> Iterator:
        yield from enumerate(_LAYOUT.packed(map(_BYTES.encode, documents), _BYTES.end))


def builder(data_dir: str) -> tfds.core.DatasetBuilder:
    """The builder that writes this dataset under `data_dir`."""
    return Docstrings(data_dir=data_dir)


def load() -> dict[str, list[str]]:
    """Split -> docstrings, each once.

    Raises:
      DataError: scikit-learn is not installed.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise errors.DataError(
            "The docstrings are those of scikit-learn, which is not installed. Install it: pip install '.[digits]'"
        )
    root = pathlib.Path(found.origin).parent
    splits: dict[str, str] = {}
    for file in sorted(root.glob("**/*.py")):
        name = file.relative_to(root).as_posix()
        if "tests/" in name or "externals/" in name:  # other people's, or none
            continue
        split = "train" if hashlib.md5(name.encode()).digest()[0] % _TEST_ONE_IN else "test"
        for text in _docstrings(file.read_text()):
            splits.setdefault(text, split)
    return {split: [text for text, of in splits.items() if of == split] for split in ("train", "test")}


def _docstrings(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        text = ast.get_docstring(node, clean=False) if isinstance(node, _DOCUMENTED) else None
        if text and len(text) >= _LEAST_CHARACTERS:
            yield inspect.cleandoc(text)
