"""languages: messages of Django in 20 languages of Latin script, that come inside it. Nothing is downloaded.

Which language is a message in? Messages of the test split are of none in training, in any language.

Source: Django (https://www.djangoproject.com, BSD-3-Clause), its translations (django/**/LC_MESSAGES/django.mo).
"""

import hashlib
import importlib.util
import pathlib
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from data import errors, tokenizer
from data.datasets.sources import tokens

NUM_SHARDS = 4
_BYTES = tokenizer.Bytes()
# Nine messages in ten are shorter; what is beyond is cut.
_LAYOUT = tokens.Layout(sequence_length=96, vocabulary=_BYTES.vocabulary)
# English is what the messages are translated from.
_SOURCE = "en"
LANGUAGES = (
    *("af", "cs", "da", "de", "en", "es", "et", "fi", "fr", "hu"),
    *("id", "it", "lt", "lv", "nl", "pl", "pt", "ro", "sv", "tr"),
)
# Shorter ones are names and units, many of them the same in several languages.
_LEAST_LETTERS = 8
_TEST_ONE_IN = 8
# Layout of a .mo file: https://www.gnu.org/software/gettext/manual/html_node/MO-Files.html
_MO_NUMBERS = 5
_CONTEXT_END, _PLURAL = "\x04", "\0"


class Languages(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Writes tokens [96] (UTF-8 bytes, see data/tokenizer.py) and label (language) in splits train and test."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    code_path = epath.Path(__file__)  # as in digits.py

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Messages of Django in 20 languages, as UTF-8 bytes.",
            homepage="https://www.djangoproject.com",
            features=tfds.features.FeaturesDict(_LAYOUT.classified_features(LANGUAGES)),
            supervised_keys=tokens.CLASSIFIED_KEYS,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        del dl_manager  # nothing to download
        messages = load()
        return {split: self._generate_examples(messages, split) for split in ("train", "test")}

    def _generate_examples(self, messages: list[tuple[str, str, str]], split: str) -> Iterator:
        for message, language, text in messages:
            if split_of(message) == split:
                yield f"{language}\0{text}", _LAYOUT.classified(_BYTES.encode(text), language)


def builder(data_dir: str) -> tfds.core.DatasetBuilder:
    """The builder that writes this dataset under `data_dir`."""
    return Languages(data_dir=data_dir)


def split_of(message: str) -> str:
    """The split of a message, by a hash of its English text."""
    return "train" if hashlib.md5(message.encode()).digest()[0] % _TEST_ONE_IN else "test"


def load() -> list[tuple[str, str, str]]:
    """(English message, language, text) of all translated messages; a text stands once in a language.

    Raises:
      DataError: Django is not installed.
    """
    found = importlib.util.find_spec("django")
    if found is None or found.origin is None:
        raise errors.DataError(
            "The messages come inside Django, which is not installed. Install it: pip install '.[languages]'"
        )
    root = pathlib.Path(found.origin).parent
    texts: dict[tuple[str, str], str] = {}
    for language in LANGUAGES:
        for file in sorted(root.glob(f"**/locale/{language}/LC_MESSAGES/django.mo")):
            for message, text in _read_mo(file.read_bytes()).items():
                if sum(map(str.isalpha, text)) >= _LEAST_LETTERS:
                    texts.setdefault((language, text), message)
    messages = sorted({message for message in texts.values() if sum(map(str.isalpha, message)) >= _LEAST_LETTERS})
    texts |= {(_SOURCE, message): message for message in messages}
    return sorted((message, language, text) for (language, text), message in texts.items())


def _read_mo(content: bytes) -> dict[str, str]:
    """Message -> translation; of several numbers the first, without the context that tells equal messages apart."""
    count, originals, translations = np.frombuffer(content, "<u4", _MO_NUMBERS)[2:]

    def strings(at: int) -> list[str]:
        table = np.frombuffer(content, "<u4", 2 * count, at).reshape(-1, 2)  # length and offset of each
        return [content[offset : offset + length].decode() for length, offset in table]

    pairs = zip(strings(originals), strings(translations), strict=True)
    return {
        message.split(_CONTEXT_END)[-1].split(_PLURAL)[0]: text.split(_PLURAL)[0] for message, text in pairs if message
    }
