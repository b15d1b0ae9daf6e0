"""The framing of TFRecord files in NumPy, for what TensorFlow's reader cannot do: go on after a damaged record.

    length uint64 | masked crc of length uint32 | data [length] | masked crc of data uint32      (all little-endian)

TensorFlow's reader checks the same sums in C++ several times as fast (scripts/bench_audit.py), so a file is read here
only from the place where that reader gave up. It has gaps, too: up to 11 bytes left over at the end of a file pass for
its end, and where a record's data is damaged the offset that it names is that of the data, not of the record.

Source: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data import catalog

HEADER_BYTES = 12  # length and its sum
OVERHEAD_BYTES = 16  # header, and the sum of the data

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_ONES = 0xFFFFFFFF
_MASK_DELTA = 0xA282EAD8
_CHUNK = 8  # bytes summed at once, before sums are joined in pairs
# Records are summed together until they take this much memory; the tables of a few levels stay in the cache.
_GROUP_BYTES = 4 << 20
_SEARCH_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


class Frame(NamedTuple):
    """One record, or what stands where records should.

    number: of the record in the file, from 0; a damaged stretch counts as one.
    offset: of its first byte in the file (of the length, not of the data).
    size: bytes of its data; of a damaged stretch, all of its bytes.
    fault: "" for a sound one, else "length_crc", "data_crc" or "truncated".
    message: what is wrong, for the user.
    """

    number: int
    offset: int
    size: int
    fault: str = ""
    message: str = ""


def load(path: str) -> np.ndarray:
    """The bytes of a file, [size] uint8; from a local disk page by page, as they are touched."""
    if not catalog.is_remote(path):
        try:
            return np.asarray(np.memmap(path, np.uint8, mode="r"))  # plain: slices of a memmap take twice as long
        except ValueError:  # an empty file cannot be mapped
            return np.zeros([0], np.uint8)
    import tensorflow as tf

    with tf.io.gfile.GFile(path, "rb") as file:
        return np.frombuffer(file.read(), np.uint8)


def frames(data: np.ndarray, offset: int = 0, number: int = 0) -> Iterator[Frame]:
    """All records of a file, sound and damaged, in file order.

    Where a length is damaged, the next record is looked for: the first place whose length fits its sum and the file.
    What lies between counts as one record, as nearly always it is.

    Args:
      data: [size] uint8, the file's bytes.
      offset: where to begin, in bytes: the beginning of a record.
      number: of the record at `offset`.
    """
    run: list[Frame] = []  # sound headers, sums of data not yet checked
    run_bytes = 0
    while offset < len(data):
        size, fault, message = _header(data, offset)
        if fault:
            yield from _check_data(data, run)
            run, run_bytes = [], 0
            end = len(data) if fault == "truncated" else _next_record(data, offset + 1)
            yield Frame(number, offset, end - offset, fault, message)
        else:
            run.append(Frame(number, offset, size))
            run_bytes += _padded(size)
            end = offset + size + OVERHEAD_BYTES
        offset, number = end, number + 1
        if run_bytes >= _GROUP_BYTES:
            yield from _check_data(data, run)
            run, run_bytes = [], 0
    yield from _check_data(data, run)


def record_at(data: np.ndarray, offset: int) -> int | None:
    """Number of the record that begins at `offset`, or None; follows lengths only, so it reads little."""
    at, number = 0, 0
    while at < offset:
        size, fault, _ = _header(data, at)
        if fault:
            return None
        at, number = at + size + OVERHEAD_BYTES, number + 1
    return number if at == offset else None


def payload(data: np.ndarray, frame: Frame) -> bytes:
    """The data of a record."""
    begin = frame.offset + HEADER_BYTES
    return data[begin : begin + frame.size].tobytes()


def crc32c(rows: np.ndarray) -> np.ndarray:
    """CRC-32C of each row: [N, size] uint8 to [N] uint32."""
    return _finish(_raw(_left_padded(rows)), rows.shape[1])


def masked(crc: np.ndarray) -> np.ndarray:
    """Sums as TFRecords store them, [N] uint32: a sum over data that holds sums would be weak."""
    crc = crc.astype(np.uint64)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA & _ONES).astype(np.uint32)


def _header(data: np.ndarray, offset: int) -> tuple[int, str, str]:
    """Size of the data of the record at `offset`, and a fault and its message (or "")."""
    left = len(data) - offset
    if left < HEADER_BYTES:
        return 0, "truncated", f"the file ends {left} bytes into a record, before its length is complete"
    header = data[offset : offset + HEADER_BYTES].tobytes()
    size = int.from_bytes(header[:8], "little")
    if _header_sum(header[:8]) != int.from_bytes(header[8:], "little"):
        zipped = "; the file is compressed with gzip" if offset == 0 and header.startswith(_GZIP_MAGIC) else ""
        return 0, "length_crc", f"the length of the record does not fit its checksum{zipped}"
    if left < size + OVERHEAD_BYTES:
        return 0, "truncated", f"the file ends {left} bytes into a record of {size + OVERHEAD_BYTES} bytes"
    return size, "", ""


@functools.lru_cache(maxsize=1 << 16)  # the records of a dataset share few lengths
def _header_sum(length: bytes) -> int:
    return int(masked(crc32c(np.frombuffer(length, np.uint8)[np.newaxis]))[0])


def _check_data(data: np.ndarray, run: list[Frame]) -> Iterator[Frame]:
    """Frames in order, with a fault where the data does not fit its sum. Those of like size are summed together."""
    sound: dict[int, bool] = {}  # number of the record -> its sum fits
    by_padded: dict[int, list[Frame]] = {}
    for frame in run:
        by_padded.setdefault(_padded(frame.size), []).append(frame)
    for padded, group in by_padded.items():
        rows = np.zeros([len(group), padded], np.uint8)
        stored = np.zeros([len(group), 4], np.uint8)
        for row, frame in enumerate(group):
            begin, end = frame.offset + HEADER_BYTES, frame.offset + HEADER_BYTES + frame.size
            rows[row, padded - frame.size :] = data[begin:end]
            stored[row] = data[end : end + 4]
        sums = _raw(rows)  # [len(group)] uint32
        sums ^= np.array([_initial(frame.size) for frame in group], np.uint32)
        fits = masked(sums ^ np.uint32(_ONES)) == stored.view("<u4")[:, 0]
        sound |= {frame.number: bool(fit) for frame, fit in zip(group, fits, strict=True)}
    for frame in run:
        if sound[frame.number]:
            yield frame
        else:
            yield frame._replace(fault="data_crc", message="the data of the record does not fit its checksum")


def _next_record(data: np.ndarray, begin: int) -> int:
    """Offset of the first record with a sound length at or after `begin`, or the size of the file.

    That other bytes look like one happens once in four billion; those of its data may be damaged, too.
    """
    for block in range(begin, len(data) - OVERHEAD_BYTES + 1, _SEARCH_BYTES):
        piece = data[block : block + _SEARCH_BYTES + HEADER_BYTES - 1]
        views = np.lib.stride_tricks.sliding_window_view(piece, HEADER_BYTES)  # [offsets, 12] uint8
        stored = np.ascontiguousarray(views[:, 8:]).view("<u4")[:, 0]
        for offset in np.flatnonzero(masked(crc32c(views[:, :8])) == stored) + block:
            if not _header(data, int(offset))[1]:
                return int(offset)
    return len(data)


# CRC-32C. A sum is a linear function of the bytes over GF(2), so that of a long row is joined from those of its halves:
# raw(a + b) = advance(raw(a), len(b)) ^ raw(b), where advance stands for len(b) zero bytes. Zeros in front of a row do
# not change its raw sum. https://stackoverflow.com/a/23126768 (Mark Adler, crc32_combine)


def _padded(size: int) -> int:
    """The smallest power of two, at least `_CHUNK`, that holds `size` bytes."""
    return max(_CHUNK, 1 << max(size - 1, 0).bit_length())


def _left_padded(rows: np.ndarray) -> np.ndarray:
    padded = np.zeros([len(rows), _padded(rows.shape[1])], np.uint8)
    padded[:, padded.shape[1] - rows.shape[1] :] = rows
    return padded


def _raw(rows: np.ndarray) -> np.ndarray:
    """Sums from state 0, without the last inversion: [N, power of two >= 8] uint8 to [N] uint32."""
    chunks = rows.reshape(len(rows), -1, _CHUNK)  # [N, chunks, 8]
    sums = np.zeros(chunks.shape[:2], np.uint32)
    for column in range(_CHUNK):
        sums ^= _tables(_CHUNK - column)[0][chunks[:, :, column]]
    length = _CHUNK
    while sums.shape[1] > 1:
        left = np.ascontiguousarray(sums[:, 0::2]).view(np.uint8).reshape(len(rows), -1, 4)
        sums = sums[:, 1::2].copy()
        for byte, table in enumerate(_tables(length)):
            sums ^= table[left[:, :, byte]]
        length *= 2
    return sums[:, 0]


def _finish(raw: np.ndarray, size: int) -> np.ndarray:
    return raw ^ np.uint32(_initial(size) ^ _ONES)


@functools.lru_cache(maxsize=1 << 16)
def _initial(size: int) -> int:
    """What the initial state of all ones adds to the raw sum of `size` bytes."""
    state, length = _ONES, 1
    while size:
        if size & 1:
            state = _apply(_advance(length), state)
        size, length = size >> 1, length * 2
    return state


@functools.cache
def _advance(length: int) -> tuple[int, ...]:
    """What each of the 32 bits of a sum becomes after `length` zero bytes; `length` a power of two or below 9."""
    if length == 1:
        bits = [1 << bit for bit in range(32)]
        for _ in range(8):
            bits = [value >> 1 ^ (_POLYNOMIAL if value & 1 else 0) for value in bits]
        return tuple(bits)
    first = _advance(length // 2)
    return tuple(_apply(_advance(length - length // 2), value) for value in first)


def _apply(bits: tuple[int, ...], value: int) -> int:
    result = 0
    for bit, image in enumerate(bits):
        if value >> bit & 1:
            result ^= image
    return result


@functools.cache
def _tables(length: int) -> np.ndarray:
    """[4, 256] uint32: what each value of each byte of a sum becomes after `length` zero bytes."""
    bits = np.array(_advance(length), np.uint32).reshape(4, 8)
    values = np.arange(256, dtype=np.uint32)
    tables = np.zeros([4, 256], np.uint32)
    for bit in range(8):
        tables ^= np.where(values >> bit & 1, bits[:, bit, np.newaxis], 0).astype(np.uint32)
    return tables
