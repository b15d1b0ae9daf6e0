"""How the records of a source become shards: the same whatever writes them, and all or nothing."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core import hashing
from tensorflow_datasets.core import writer as writer_lib

from data import build, processes, shard_writer
from data.datasets.sources import image_folder, source, table

ROOT = pathlib.Path(__file__).parents[2]
# Some tasks more than are done without worker processes.
NUM_IMAGES = (processes.TASKS_WITHOUT_WORKERS + 2) * image_folder._TASK_IMAGES - 100


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> pathlib.Path:
    """A folder of tiny images of two sizes, all different."""
    root = tmp_path_factory.mktemp("photos")
    for label in ("cat", "dog"):
        (root / label).mkdir()
    for i in range(NUM_IMAGES):
        pixels = tf.constant([i % 256, i // 256, 0], tf.uint8, shape=(1, 1, 3))
        image = tf.io.encode_png(tf.tile(pixels, [1, 1 + i % 2, 1])).numpy()
        (root / ("cat", "dog")[i % 2] / f"{i:04}.png").write_bytes(image)
    return root


def shards(directory: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.tfrecord*"))}


class _Serialized:
    """A serializer for records that come serialized."""

    def serialize_example(self, example: bytes) -> bytes:
        return example


def test_shards_are_those_of_the_writer_of_tfds(photos, tmp_path):
    options = ["--name=photos", "--num_shards=5", "--splits=train=0.9,test=0.1"]
    for workers in (1, 3):
        arguments = ["build", str(photos), f"--data_dir={tmp_path / str(workers)}", f"--workers={workers}", *options]
        assert build.main(arguments) == build.EXIT_DONE
    found = shards(tmp_path / "1" / "photos" / "1.0.0")
    assert shards(tmp_path / "3" / "photos" / "1.0.0") == found
    folder = image_folder.ImageFolder(str(photos), source.Options())
    encoder = shard_writer.Encoder(folder, source.Splits.parse("train=0.9,test=0.1"), "")
    builder = tfds.builder_from_directory(tmp_path / "1" / "photos" / "1.0.0")
    (tmp_path / "tfds").mkdir()
    for name, split in builder.info.splits.items():
        writer = writer_lib.Writer(
            serializer=_Serialized(),
            filename_template=split.filename_template.replace(data_dir=tmp_path / "tfds"),
            hash_salt=name,
            disable_shuffling=False,
            example_writer=writer_lib.ExampleWriter(builder.info.file_format),
            shard_config=shard_writer.Shards(num_shards=5),
        )
        for task in folder.pieces():
            for of, key, record in encoder.records(task):
                if of == name:
                    writer.write(key, record)
        assert writer.finalize() == (split.shard_lengths, split.num_bytes)
    assert shards(tmp_path / "tfds") == found


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_that_looks_finished(photos, tmp_path, capsys):
    """Build, killed in the middle: a file that never ends holds a worker until then."""
    data_dir = tmp_path / "built"
    arguments = [str(photos), f"--data_dir={data_dir}", "--name=photos", "--workers=2"]
    last = photos / "dog" / "9999.png"
    os.mkfifo(last)
    process = subprocess.Popen([sys.executable, "-m", "data.build", *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    with last.open("wb"):  # opens when the worker does
        [left] = (data_dir / "photos").glob("incomplete.*")
        assert build.main(["build", *arguments]) == build.EXIT_DATA
        assert "Another process is building" in capsys.readouterr().err
        process.send_signal(signal.SIGKILL)
        process.wait()
        # All that shared its output are gone when that ends; the blocked worker, too.
        assert process.stdout is not None and process.stdout.read() == b""
    process.stdout.close()
    last.unlink()
    assert left.exists() and not list(data_dir.glob("**/dataset_info.json"))

    assert build.main(["build", *arguments]) == build.EXIT_DONE
    assert not left.exists()
    assert build.main(["build", *arguments[:2], "--name=other"]) == build.EXIT_DONE
    whole = shards(data_dir / "other" / "1.0.0")
    assert {name.replace("other", "photos"): content for name, content in whole.items()} == shards(
        data_dir / "photos" / "1.0.0"
    )
    assert sorted(path.name for path in (data_dir / "photos").iterdir()) == [".1.0.0.lock", "1.0.0"]


@pytest.mark.parametrize(
    ("mib", "num_examples", "expected"),
    [
        (0, 1, 1),
        (0, 40, 2),  # 16 records in each at least
        (1, 1_000, 8),  # as many as training reads at a time
        (1_024, 100_000, 8),
        (1_025, 100_000, 16),
        (10_000, 100_000, 128),
        (1_000, 5, 4),  # no more than records, and a power of two
    ],
)
def test_number_of_shards(mib, num_examples, expected):
    total_size = mib * 2**20 - num_examples * shard_writer.FRAME_BYTES
    assert shard_writer.Shards().get_number_shards(total_size, num_examples) == expected
    assert shard_writer.Shards(num_shards=3).get_number_shards(total_size, num_examples) == 3


def test_keys_hash_as_in_tfds():
    hasher = hashing.Hasher("train")
    for key in ("a/b.png", "a\\b", "ü"):
        assert shard_writer.key_hash("train", key) == hasher.hash_key(key).to_bytes(16, "big")


def test_a_record_is_the_same_bytes_in_every_process(tmp_path):
    # Protobuf leaves the order of a map to a hash that each process salts anew; sorted is the order that stays.
    names = [f"column_{letter}" for letter in "hbgcafed"]
    (tmp_path / "t.csv").write_text(f"{','.join(names)},label\n{'1,' * 8}x\n")
    rows = table.Table(str(tmp_path / "t.csv"), source.Options())
    encoder = shard_writer.Encoder(rows, source.Splits(), "")
    [(_, _, record)] = encoder.records(next(rows.open(next(iter(rows.pieces())))))
    places = [record.index(name.encode()) for name in sorted(names)]
    assert places == sorted(places)
