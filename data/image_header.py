"""Size and channels of an encoded image from its first bytes: decoding takes a thousand times as long."""

from typing import NamedTuple

# Enough for every PNG, and for a JPEG without a thumbnail or a colour profile.
PREFIX_BYTES = 1024

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # colour type -> channels; 3 is a palette, which decodes to RGB
_PNG_HEADER_BYTES = 26
_JPEG_MAGIC = b"\xff\xd8\xff"
# Segments that state the size: all SOFn but DHT, JPG and DAC, which share their range of numbers.
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_OTHER_MAGICS = (b"GIF8", b"BM", b"RIFF")  # formats TensorFlow decodes, too


class Header(NamedTuple):
    """Size in pixels and number of channels as stored; None where only decoding tells."""

    height: int | None
    width: int | None
    channels: int | None


UNKNOWN = Header(None, None, None)


def read(image: bytes) -> Header | None:
    """Reads the header of an image, of which `image` is all or the first bytes.

    Returns:
      Its header; UNKNOWN where the bytes at hand do not tell; None if this is no image that TensorFlow decodes.
    """
    if image.startswith(_PNG_MAGIC):
        if len(image) < _PNG_HEADER_BYTES or image[25] not in _PNG_CHANNELS:
            return None
        width, height = int.from_bytes(image[16:20], "big"), int.from_bytes(image[20:24], "big")
        return Header(height, width, _PNG_CHANNELS[image[25]])
    if image.startswith(_JPEG_MAGIC):
        return _jpeg(image)
    return UNKNOWN if image.startswith(_OTHER_MAGICS) else None


def _jpeg(image: bytes) -> Header:
    at = 2
    while at + 10 <= len(image) and image[at] == 0xFF:
        marker = image[at + 1]
        if marker in _JPEG_SIZES:
            height, width = int.from_bytes(image[at + 5 : at + 7], "big"), int.from_bytes(image[at + 7 : at + 9], "big")
            return Header(height, width, image[at + 9])
        at += 1 if marker == 0xFF else 2 + int.from_bytes(image[at + 2 : at + 4], "big")  # 0xFF may be filled up with
    return UNKNOWN
