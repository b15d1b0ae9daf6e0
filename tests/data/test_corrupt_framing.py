"""The framing of TFRecords in NumPy, against TensorFlow's own writer and reader."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from data import framing

SIZES = (0, 1, 3, 4, 5, 8, 9, 100, 4_096, 70_001)


def write(path: pathlib.Path, sizes: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for size in sizes:
            writer.write(rng.bytes(size))
    return np.array(framing.load(str(path)))


def offsets(sizes: tuple[int, ...]) -> list[int]:
    return np.cumsum([0, *(size + framing.OVERHEAD_BYTES for size in sizes)]).tolist()


@pytest.mark.parametrize(
    ("data", "crc"),  # RFC 3720, B.4
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_crc32c_is_that_of_the_standard(data, crc):
    assert framing.crc32c(np.frombuffer(data, np.uint8)[np.newaxis]).tolist() == [crc]


def test_what_tensorflow_writes_is_read(tmp_path):
    data = write(tmp_path / "file", SIZES)
    frames = list(framing.frames(data))
    assert [frame.size for frame in frames] == list(SIZES)
    assert [frame.offset for frame in frames] == offsets(SIZES)[:-1]
    assert not any(frame.fault for frame in frames)
    expected = [record.numpy() for record in tf.data.TFRecordDataset(str(tmp_path / "file"))]
    assert [framing.payload(data, frame) for frame in frames] == expected


def test_every_flipped_bit_is_seen_at_its_record_and_costs_no_other(tmp_path):
    sizes = (40, 25, 0, 33)
    data = write(tmp_path / "file", sizes)
    begins = offsets(sizes)
    for byte in range(len(data)):
        spoiled = data.copy()
        spoiled[byte] ^= 1 << byte % 8
        number = np.searchsorted(begins, byte, side="right") - 1
        faults = {frame.number: frame.fault for frame in framing.frames(spoiled)}
        kind = "length_crc" if byte - begins[number] < framing.HEADER_BYTES else "data_crc"
        assert faults == {n: kind if n == number else "" for n in range(len(sizes))}, f"byte {byte}"


def test_every_truncation_is_seen(tmp_path):
    sizes = (40, 25, 33)
    data = write(tmp_path / "file", sizes)
    begins = offsets(sizes)
    for size in range(len(data) + 1):
        frames = list(framing.frames(data[:size]))
        whole = sum(end <= size for end in begins[1:])
        assert [frame.fault for frame in frames[:whole]] == [""] * whole
        assert [frame.fault for frame in frames[whole:]] == ([] if size in begins else ["truncated"])


def test_a_long_damaged_stretch_is_one_record_and_the_next_is_found(tmp_path):
    sizes = (500, 2 << 20, 300, 200)  # longer than one block of the search
    data = write(tmp_path / "file", sizes)
    data[500 + 16 + 4 :][: 2 << 20] = 255
    frames = list(framing.frames(data))
    assert [frame.fault for frame in frames] == ["", "length_crc", "", ""]
    assert frames[2].offset == offsets(sizes)[2]


def test_damage_behind_damage_is_seen_by_itself(tmp_path):
    sizes = (50, 50, 50, 50)
    data = write(tmp_path / "file", sizes)
    begins = offsets(sizes)
    data[begins[1] + 3] ^= 1  # length
    data[begins[2] + 30] ^= 1  # data
    assert [frame.fault for frame in framing.frames(data)] == ["", "length_crc", "data_crc", ""]


def test_record_at_knows_where_records_begin(tmp_path):
    data = write(tmp_path / "file", SIZES)
    begins = offsets(SIZES)
    assert [framing.record_at(data, begin) for begin in begins] == list(range(len(begins)))
    assert framing.record_at(data, begins[4] + 1) is None
