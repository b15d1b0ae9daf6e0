"""TFDS builders around a source: one writes with the processes of this machine, one with Apache Beam."""

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.core import writer as writer_lib

from data import catalog, errors, shard_writer
from data.datasets.sources import source as sources

_PROVENANCE_FILE = "metadata.json"  # where TFDS keeps a dataset's metadata
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is made of a source.

    name: of the dataset.
    version: of the dataset, e.g. "1.0.0".
    fractions: of the splits, where the source has none.
    workers: processes that write on this machine.
    options: of the source.
    sharding: what was asked of the shards.
    """

    name: str
    version: str
    fractions: sources.Splits
    workers: int
    options: sources.Options
    sharding: Mapping[str, float]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise errors.DataError(
                f"A dataset's name is made of small letters, digits and _. Received: {self.name!r}. "
                "Give one: --name=NAME."
            )
        if not re.fullmatch(r"\d+\.\d+\.\d+", self.version):
            raise errors.DataError(f"A version is three numbers, like 1.0.0. Received: --version={self.version}.")
        if self.workers < 1:
            raise errors.DataError(f"It takes at least one process. Received: --workers={self.workers}.")


class SourceBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Writes a source with the processes of this machine."""

    code_path = None  # no package of its own to copy checksums from

    def __init__(self, source: sources.Source, plan: Plan, data_dir: str):
        self.name = plan.name
        self.VERSION = tfds.core.Version(plan.version)
        self._source = source
        self._plan = plan
        super().__init__(data_dir=data_dir)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"Built from the {self._source.KIND} {self._source.path}.",
            features=tfds.features.FeaturesDict(dict(self._source.features)),
            supervised_keys=self._source.supervised_keys,
            metadata=tfds.core.MetadataDict(self.provenance()),
        )

    def provenance(self) -> dict[str, Any]:
        """What the dataset was built from and how; stays with it as metadata.json."""
        fractions = None if self._source.own_splits else dict(self._plan.fractions.fractions)
        return {
            "source": self._source.path,
            "source_fingerprint": self._source.fingerprint,
            "splits": fractions or list(self._source.own_splits),
            "sharding": dict(self._plan.sharding),
            "options": dataclasses.asdict(self._plan.options),
        }

    def check_same(self) -> None:
        """Raises DataError where the dataset is there, but built from something else or in another way."""
        path = self.data_path / _PROVENANCE_FILE
        if not catalog.is_there(os.fspath(self.data_path)):
            return
        there = json.loads(path.read_text()) if path.exists() else {}
        here = json.loads(json.dumps(self.provenance()))  # tuples are lists there
        odd = [name for name in here if name != "source" and (name not in there or there[name] != here[name])]
        if odd:
            raise errors.DataError(
                f"{self.data_path} is there, but of another {' and '.join(odd)}: "
                f"{there[odd[0]] if odd[0] in there else 'none'}, now {here[odd[0]]}. "
                "Give this one another --version or --name, or delete the old one."
            )

    def _generate_splits(
        self, dl_manager: Any, download_config: tfds.download.DownloadConfig
    ) -> Sequence[tfds.core.SplitInfo]:
        del dl_manager  # nothing to download
        # Inside TFDS's directory for the unfinished: what a killed build leaves lies in one place.
        at = None if catalog.is_remote(os.fspath(self.data_path)) else self.data_path
        with tempfile.TemporaryDirectory(prefix="runs.", dir=at) as directory:
            encoder = shard_writer.Encoder(self._source, self._plan.fractions, directory)
            templates = {split: self._get_filename_template(split) for split in encoder.splits}
            self._keep_files()
            return shard_writer.write(encoder, templates, download_config.get_shard_config(), self._plan.workers)

    def _keep_files(self) -> None:
        for name, content in self._source.files.items():
            (self.data_path / name).write_bytes(content)

    def _split_generators(self, dl_manager: Any) -> dict:
        raise NotImplementedError("written by _generate_splits")

    def _generate_examples(self) -> Iterator:
        raise NotImplementedError("written by _generate_splits")


class BeamSourceBuilder(SourceBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Writes the same records as an Apache Beam pipeline, with TFDS's Beam writer."""

    def _generate_splits(
        self, dl_manager: Any, download_config: tfds.download.DownloadConfig
    ) -> Sequence[tfds.core.SplitInfo]:
        import apache_beam as beam
        from apache_beam.options import pipeline_options

        del dl_manager  # nothing to download
        encoder = shard_writer.Encoder(self._source, self._plan.fractions, directory="")
        options = download_config.beam_options
        options.view_as(pipeline_options.TypeOptions).pipeline_type_check = False  # TFDS's writer would not pass it
        writers = {}
        with beam.Pipeline(runner=download_config.beam_runner, options=options) as pipeline:
            records = self._records(pipeline, encoder)
            self._keep_files()
            for split in encoder.splits:
                writers[split] = writer_lib.BeamWriter(
                    serializer=_Serialized(),
                    filename_template=self._get_filename_template(split),
                    hash_salt=split,
                    disable_shuffling=False,
                    example_writer=self._example_writer(),
                    shard_config=download_config.get_shard_config(),
                )
                write = beam.ptransform_fn(lambda rows, writer=writers[split]: writer.write_from_pcollection(rows))
                own = records | f"Take_{split}" >> beam.FlatMap(_of_split, split)
                _ = own | f"Write_{split}" >> write()
        infos = []
        for split, writer in writers.items():
            lengths, num_bytes = writer.finalize()
            template = self._get_filename_template(split)
            infos.append(tfds.core.SplitInfo(split, lengths, num_bytes, template))
        return infos

    def _records(self, pipeline: Any, encoder: shard_writer.Encoder) -> Any:
        """PCollection of (split, key, serialized record)."""
        import apache_beam as beam

        records = (
            pipeline
            | "Pieces" >> beam.Create(list(self._source.pieces()))
            | "SpreadPieces" >> beam.Reshuffle()
            | "Open" >> beam.FlatMap(self._source.open)
            | "SpreadTasks" >> beam.Reshuffle()
            | "Encode" >> beam.FlatMap(encoder.records)
        )
        if self._source.unique_keys:
            return records
        # TFDS takes a key once; equal examples get keys that differ. The split was chosen by the one they share.
        return (
            records
            | "ByKey" >> beam.Map(lambda row: (row[:2], row[2]))
            | "Equal" >> beam.GroupByKey()
            | "Number" >> beam.FlatMap(_numbered)
        )


class _Serialized:
    """Stands where TFDS's Beam writer expects a serializer: records come serialized."""

    example_specs: Any = None  # for an error message about two records of one key

    def serialize_example(self, example: bytes) -> bytes:
        return example


def _of_split(row: tuple[str, str, bytes], split: str) -> list[tuple[str, bytes]]:
    return [row[1:]] if row[0] == split else []


def _numbered(group: tuple) -> Iterator[tuple]:
    (split, key), records = group
    for number, record in enumerate(records):
        yield split, f"{key}#{number}" if number else key, record


@contextlib.contextmanager
def alone(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
    """Holds the right to build this version on this machine, and removes what killed builds of it have left behind.

    Raises:
      DataError: another process is building it.
    """
    import fcntl

    path = builder.data_path
    if catalog.is_remote(os.fspath(path)):
        yield  # object stores have no locks: staging.py tells of others
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise errors.DataError(
                f"Another process is building {path}. Wait for it, or give another --name."
            ) from error
        for left in path.parent.glob(f"incomplete.*_{path.name}"):
            epath.Path(left).rmtree()
        yield
