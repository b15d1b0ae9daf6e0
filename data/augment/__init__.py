"""What happens to training images, on the host and on the device.

    decode ─▶ crop ─▶ RandAugment ─▶ (x, y, numbers) ─▶ flip ─▶ erase ─▶ mix
              (crops.py, rand_augment.py)                (trainer/augmentation.py)

What moves pixels about as each image needs it, or looks up tables, stays with the host: XLA has no such operation
(ImageProjectiveTransformV3), or a TPU is slow at it (gathers). What is arithmetic happens on the device. Both are given
their random numbers (numbers.py), and draw none.
"""

import dataclasses

NO_FLIP, HORIZONTAL, BOTH = "none", "horizontal", "both"
FLIPS = (NO_FLIP, HORIZONTAL, BOTH)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What is done to the images of a training batch; by default nothing but the crop that photographs need anyway.

    crop_area: least share of the area that a crop of any place and shape has; None: no such crop.
    crop_padding: pixels around the image, out of which its size is cut at a random place.
    rand_augment: operations of RandAugment an image, of strength rand_augment_magnitude (`rand_augment.MOST`: most).
    flip: of FLIPS; each of its directions in half of the images.
    random_erasing: share of the images of which a rectangle is erased.
    mixup, cutmix: alpha of the Beta(alpha, alpha) that says how much of an image is its neighbour's; 0: none is. With
      both, each pair of neighbours is mixed by one of the two.
    """

    crop_area: float | None = None
    crop_padding: int = 0
    rand_augment: int = 0
    rand_augment_magnitude: float = 0.0
    flip: str = NO_FLIP
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    @property
    def mixes(self) -> bool:
        """Whether examples are made of two."""
        return bool(self.mixup or self.cutmix)

    @property
    def on_host(self) -> tuple[str, ...]:
        """What the host does, for people."""
        return _named(
            ("crop of random area", self.crop_area is not None),
            ("crop of the padded image", bool(self.crop_padding)),
            ("RandAugment", bool(self.rand_augment)),
        )

    @property
    def on_device(self) -> tuple[str, ...]:
        """What the device does, for people."""
        return _named(
            ("flip", self.flip != NO_FLIP),
            ("random erasing", bool(self.random_erasing)),
            ("mixup", bool(self.mixup)),
            ("CutMix", bool(self.cutmix)),
        )


NONE = Augmentation()


def _named(*parts: tuple[str, bool]) -> tuple[str, ...]:
    return tuple(name for name, is_on in parts if is_on)
