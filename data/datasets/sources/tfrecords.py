"""TFRecords that are there already: adopted where they lie. Only metadata is written beside them, no record.

What the records hold is told by a file, TOML or JSON, or the features.json of another TFDS dataset:

    inputs = ["image"]  # left out: all but the label
    label = "label"
    [features]
    image = {type = "image", shape = [-1, -1, 3], encoding = "jpeg"}  # -1: varies
    label = {type = "class", num_classes = 10}  # or names = ["cat", "dog"]
    size = {type = "tensor", shape = [2], dtype = "float32"}  # shape [] is a number; bytes = true: raw bytes
"""

import concurrent.futures
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.core import naming
from tqdm import tqdm

from data import catalog, errors
from data.datasets.sources import source as sources

KIND = "TFRecords"
OPTIONS = frozenset({"features", "filename_template", "name", "label"})
_INFO_FILE = "dataset_info.json"
_RECORDS = re.compile(r"(?!\.).*(\.(tfrecords?|tfrec)(-\d{5,}-of-\d{5,})?|-\d{5,}-of-\d{5,})")
# TFDS writes numbers of shards with 5 digits or more, and finds files by writing their names anew.
_TEMPLATES = (
    "{DATASET}-{SPLIT}.SUFFIX-{SHARD_X_OF_Y}",
    "{SPLIT}.SUFFIX-{SHARD_X_OF_Y}",
    "{SPLIT}-{SHARD_X_OF_Y}.SUFFIX",
    "{SPLIT}-{SHARD_X_OF_Y}",
    "{SPLIT}-{SHARD_INDEX}.SUFFIX",
    "{SPLIT}_{SHARD_INDEX}.SUFFIX",
    "{SPLIT}.SUFFIX",
)
_SUFFIXES = ("tfrecord", "tfrecords", "tfrec")
_COUNT_BATCH = 1024
_READ_BUFFER_BYTES = 4 << 20
_THREADS = 16
_ENCODINGS = {False: tfds.features.Encoding.NONE, True: tfds.features.Encoding.BYTES}


def is_adoptable(directory: str) -> bool:
    """Whether a directory holds files named like TFRecords."""
    return any(_RECORDS.fullmatch(path.name) for path in epath.Path(directory).iterdir())


def adopt(directory: str, features_file: str, *, label: str | None, template: str | None, name: str | None) -> bool:
    """Writes features.json and dataset_info.json into a directory of TFRecords. Reads every record once, to count.

    Args:
      directory: holds the files, all of one name template.
      features_file: see above.
      label: name of the label, where the file does not tell it.
      template: of the file names, in TFDS's words, e.g. "{SPLIT}/{SHARD_X_OF_Y}.rec"; None finds it.
      name: of the dataset; None takes it from the files or the directory.

    Returns:
      False if the same metadata is there already.

    Raises:
      DataError: files of no known names, a description that does not fit the records, other metadata there already.
    """
    features, keys = read_description(features_file, label)
    folder = epath.Path(directory)
    if (folder / _INFO_FILE).exists():
        if _is_described(folder, features):
            return False
        raise errors.DataError(
            f"{directory} is described already, and otherwise. To describe it anew, delete its features.json and "
            f"{_INFO_FILE}."
        )
    found = _shards(folder, template, name)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        paths = {split: [os.fspath(path) for path in t.sharded_filepaths(count)] for split, (t, count) in found.items()}
        flat = [path for each in paths.values() for path in each]
        bar = tqdm(pool.map(lambda path: _count(path, features), flat), total=len(flat), unit=" shards", disable=None)
        counts = dict(zip(flat, bar, strict=True))
    infos = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=[counts[path][0] for path in paths[split]],
            num_bytes=sum(counts[path][1] for path in paths[split]),
            filename_template=template,
        )
        for split, (template, _) in found.items()
    ]
    _write(folder, infos, features, keys)
    return True


def read_description(path: str, label: str | None) -> tuple[Any, tuple[Any, str]]:
    """Features (tfds.features.FeaturesDict) and supervised_keys, from a file of the form above.

    Raises:
      DataError: not of that form.
    """
    try:
        text = epath.Path(path).read_text()
        content = tomllib.loads(text) if path.endswith(".toml") else json.loads(text)
        if "pythonClassName" in content:
            # Names of classes lie in files beside it.
            features = tfds.features.FeatureConnector.from_config(os.path.dirname(os.path.abspath(path)))
            inputs: list[str] = []
            named = label or "label"
        else:
            features = tfds.features.FeaturesDict(
                {name: _feature(name, each) for name, each in content["features"].items()}
            )
            inputs, named = content["inputs"] if "inputs" in content else [], label or content["label"]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise errors.DataError(
            f"{path} does not describe features ({type(error).__name__}: {error}). It is TOML or JSON, like "
            'label = "y", [features], x = {type = "tensor", shape = [8], dtype = "float32"}, '
            'y = {type = "class", num_classes = 10}; or the features.json of a TFDS dataset.'
        ) from error
    for name in [*inputs, named]:
        if name not in features:
            there = list(features)
            raise errors.DataError(
                f"{path} describes no feature {name!r}{catalog.nearest(name, there)}, only {', '.join(there)}. "
                "Name the label by --label."
            )
    return features, sources.inputs_and_label(inputs or [name for name in features if name != named], named)


def _feature(name: str, described: Mapping[str, Any]) -> Any:
    """One entry of [features]."""
    kind, words = described["type"], set(described) - {"type"}
    known = {"image": {"shape", "encoding"}, "class": {"names", "num_classes"}, "text": set()}
    known["tensor"] = {"shape", "dtype", "bytes"}
    if kind not in known or words - known[kind]:
        raise ValueError(f"feature {name!r}: {dict(described)}; known are {', '.join(known)} with {known.get(kind)}")
    shape = tuple(None if size < 0 else size for size in described["shape"]) if "shape" in words else ()
    if kind == "image":
        encoding = described["encoding"] if "encoding" in words else None
        return tfds.features.Image(shape=shape or None, encoding_format=encoding)
    if kind == "class":
        return tfds.features.ClassLabel(**{word: described[word] for word in words})
    if kind == "text":
        return tfds.features.Text()
    raw = described["bytes"] if "bytes" in words else False
    return tfds.features.Tensor(shape=shape, dtype=np.dtype(described["dtype"]), encoding=_ENCODINGS[raw])


def _is_described(folder: epath.Path, features: Any) -> bool:
    """Whether the files in which TFDS keeps these features, names of classes among them, are there."""
    with tempfile.TemporaryDirectory() as staging:
        features.save_config(staging)
        files = list(epath.Path(staging).iterdir())
        return all(
            (folder / file.name).exists() and (folder / file.name).read_text() == file.read_text() for file in files
        )


def _shards(
    folder: epath.Path, template: str | None, name: str | None
) -> dict[str, tuple[naming.ShardedFileTemplate, int]]:
    """Template and number of shards by split, once all are known to be there."""
    names = sorted(path.name for path in folder.iterdir() if template or _RECORDS.fullmatch(path.name))
    texts = [template] if template else [t.replace("SUFFIX", suffix) for t in _TEMPLATES for suffix in _SUFFIXES]
    for text in texts:
        shape = naming.ShardedFileTemplate(folder, text, filetype_suffix="tfrecord")
        infos = [shape.parse_filename_info(each) for each in names]
        infos = [info for info in infos if info is not None]
        if infos and (template or len(infos) == len(names)):
            break
    else:
        raise errors.DataError(
            f"The files in {folder} are not named as TFDS can find them: {', '.join(names[:3])}. All must be like "
            f"one of {', '.join(_TEMPLATES)}, numbers with 5 digits; rename them, or give --filename_template."
        )
    found = {}
    dataset = name or next((info.dataset_name for info in infos if info.dataset_name), None) or _snake(folder.name)
    for split in sorted({info.split or "train" for info in infos}):
        indices = sorted(info.shard_index or 0 for info in infos if (info.split or "train") == split)
        of = {info.num_shards for info in infos if (info.split or "train") == split} - {None}
        if indices != list(range(max(of, default=len(indices)))) or len(of) > 1:
            raise errors.DataError(f"Shards of {split!r} in {folder} are missing or double: {len(indices)} are there.")
        found[split] = (shape.replace(split=split, dataset_name=dataset), len(indices))
    return found


def _snake(name: str) -> str:
    text = re.sub(r"\W+", "_", name).strip("_").lower()
    return text if text[:1].isalpha() else f"dataset_{text}"


def _count(path: str, features: Any) -> tuple[int, int]:
    """Records and their bytes in a file; the first record must parse."""
    records = tf.data.TFRecordDataset(path, buffer_size=_READ_BUFFER_BYTES)
    try:
        for record in records.take(1):
            features.deserialize_example(record)
        sizes = records.batch(_COUNT_BATCH).map(
            lambda batch: tf.stack(
                [tf.size(batch, tf.int64), tf.reduce_sum(tf.cast(tf.strings.length(batch), tf.int64))]
            )
        )
        count, num_bytes = sizes.reduce(tf.zeros([2], tf.int64), tf.add).numpy()
    except tf.errors.DataLossError as error:
        raise errors.DataError(f"{path} is damaged: {error.message} Mend or remove it.") from error
    except (tf.errors.OpError, ValueError) as error:
        raise errors.DataError(
            f"The first record of {path} is not as described: {str(error).splitlines()[0]}"
        ) from error
    return int(count), int(num_bytes)


def _write(folder: epath.Path, infos: list[Any], features: Any, keys: tuple[Any, str]) -> None:
    """TFDS writes the metadata elsewhere, then it moves in; dataset_info.json, which makes it a dataset, comes last."""
    with tempfile.TemporaryDirectory() as staging:
        for info in infos:  # TFDS takes names from a listing of the directory
            for name in info.filename_template.sharded_filenames(info.num_shards):
                (epath.Path(staging) / name).touch()
        first = infos[0].filename_template
        tfds.folder_dataset.write_metadata(
            data_dir=staging,
            features=features,
            split_infos=[
                tfds.core.SplitInfo(
                    info.name, info.shard_lengths, info.num_bytes, info.filename_template.replace(data_dir=staging)
                )
                for info in infos
            ],
            filename_template=first.replace(data_dir=staging, split=None),
            supervised_keys=keys,
            check_data=False,
        )
        written = [path for path in epath.Path(staging).iterdir() if path.stat().length]
        for path in sorted(written, key=lambda path: path.name == _INFO_FILE):
            part = folder / f".{path.name}.part"
            path.copy(part, overwrite=True)
            part.replace(folder / path.name)
