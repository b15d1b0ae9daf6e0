"""A folder of images: class/file.jpg, or split/class/file.jpg where it comes with splits."""

import dataclasses
import os
from collections.abc import Iterable, Iterator

import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

from data import errors, image_header
from data.datasets.sources import source

_SUFFIXES = (".jpg", ".jpeg", ".png")
# Images in a task: some 25 MB of photographs.
_TASK_IMAGES = 256


@dataclasses.dataclass(frozen=True)
class File:
    """An image: `path` relative to the root, with "/"; its class; its own split or None."""

    path: str
    label: str
    split: str | None


class ImageFolder(source.Source):
    """Keys are paths relative to the root. Files are stored as they are; each is decoded once to see that it can be.

    Images of one size give a static shape; else height and width are None, and training sets image_size.
    """

    KIND = "image folder"
    OPTIONS = frozenset({"channels"})

    def __init__(self, path: str, options: source.Options):
        """Lists the folder.

        Raises:
          DataError: no images in it, images without a class, or a number of channels other than 1 and 3.
        """
        if options.channels not in (1, 3):
            raise errors.DataError(
                f"Images are decoded to 1 (grey) or 3 (colour) channels. Received: {options.channels}."
            )
        self.path = path
        self._files, other, sizes = _list(path)
        self.own_splits = tuple(sorted({file.split for file in self._files if file.split}))
        self.fingerprint = source.fingerprint(sizes)
        self.num_examples = len(self._files)
        labels = sorted({file.label for file in self._files})
        side = _common_size(path, self._files)
        self._shape = (*(side or (None, None)), options.channels)
        self.features = {
            "image": tfds.features.Image(shape=self._shape),
            "label": tfds.features.ClassLabel(names=labels),
        }
        self.supervised_keys = ("image", "label")
        if other:
            self.notes = (
                f"{len(other)} files are left out, because they are no {', '.join(_SUFFIXES)}; one is {other[0]}.",
            )

    def pieces(self) -> Iterable[list[File]]:
        """Lists of files."""
        files = self._files
        return (files[start : start + _TASK_IMAGES] for start in range(0, len(files), _TASK_IMAGES))

    def open(self, piece: list[File]) -> Iterator[list[File]]:
        """A piece is a task: workers read the files."""
        yield piece

    def examples(self, task: list[File]) -> Iterator[source.Example]:
        """One for each file."""
        for file in task:
            content = (epath.Path(self.path) / file.path).read_bytes()
            self._check(file.path, content)
            yield file.split, file.path, {"image": content, "label": file.label}

    def __getstate__(self) -> dict:
        # Workers are told their files: a list of millions would travel to each of them.
        return {**self.__dict__, "_files": []}

    def _check(self, path: str, content: bytes) -> None:
        """Decodes with what training decodes with: a truncated file may have a sound header."""
        try:
            image = tf.io.decode_image(content, channels=self._shape[-1], expand_animations=False)  # [H, W, C] uint8
        except tf.errors.InvalidArgumentError as error:
            raise errors.DataError(
                f"{os.path.join(self.path, path)} cannot be decoded: {error.message.splitlines()[0]} "
                f"It has {len(content)} bytes. Replace it or remove it."
            ) from error
        if self._shape[0] is not None and image.shape != self._shape:
            raise errors.DataError(
                f"{os.path.join(self.path, path)} has shape {tuple(image.shape)}, its header said {self._shape}. "
                "Replace it or remove it."
            )


def _list(root: str) -> tuple[list[File], list[str], list[tuple[str, int]]]:
    """Images, names of other files, and (name, bytes) of images; hidden files and folders do not count."""
    images: list[str] = []
    other: list[str] = []
    for directory, _, names in tf.io.gfile.walk(root):
        inside = os.path.relpath(directory, root)
        parts = [] if inside == "." else inside.split(os.sep)
        if any(part.startswith(".") for part in parts):
            continue
        for name in names:
            if not name.startswith("."):
                found = images if name.lower().endswith(_SUFFIXES) else other
                found.append("/".join([*parts, name]))
    if not images:
        raise errors.DataError(
            f"{root} holds no images ({', '.join(_SUFFIXES)}) among {len(other)} files. "
            "It should hold class/file.jpg, or train/class/file.jpg and test/class/file.jpg."
        )
    folder = epath.Path(root)
    return _classify(root, sorted(images)), sorted(other), [(path, (folder / path).stat().length) for path in images]


def _classify(root: str, images: list[str]) -> list[File]:
    """Class and split of each image, from the folders it lies in."""
    # A folder has splits where all folders in it are named like splits: "test" beside "cat" is a class.
    has_splits = all(path.split("/")[0].lower() in source.OWN_SPLITS for path in images)
    depth = 2 if has_splits else 1
    files = []
    for path in images:
        parts = path.split("/")
        if len(parts) <= depth:
            raise errors.DataError(
                f"{os.path.join(root, path)} has no class: images lie in "
                f"{'split/' if has_splits else ''}class/file.jpg. Move it into the folder of its class, or remove it."
            )
        split = source.OWN_SPLITS[parts[0].lower()] if has_splits else None
        files.append(File(path, parts[depth - 1], split))
    return files


def _common_size(root: str, files: list[File]) -> tuple[int, int] | None:
    """(height, width) of all images, or None where two differ. Reads headers, and stops at the first that differs."""
    common: tuple[int, int] | None = None
    for file in files:
        with (epath.Path(root) / file.path).open("rb") as stream:
            head = stream.read(image_header.PREFIX_BYTES)
            header = image_header.read(head)
            if header == image_header.UNKNOWN:  # behind a thumbnail
                header = image_header.read(head + stream.read())
        if header is None:
            raise errors.DataError(
                f"{os.path.join(root, file.path)} is no image that can be read. Replace it or remove it."
            )
        size = None if header.height is None or header.width is None else (header.height, header.width)
        if size is None or (common is not None and common != size):
            return None
        common = size
    return common
