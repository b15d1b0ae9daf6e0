"""What is done to images and labels of training, and to no others."""

import dataclasses

from trainer.options.field import option

# `data.augment.rand_augment.MOST`, and names of `data.augment.FLIPS`; this module imports no TensorFlow.
MOST_MAGNITUDE = 10.0
_FLIPS = ("none", "horizontal", "both")


@dataclasses.dataclass(frozen=True)
class AugmentationOptions:
    """What is done to images and labels of training, and to no others."""

    crop_area: float | None = option(
        None,
        "crop a part of random place and shape with at least this share of the image's area, such as 0.08; default: of "
        "photographs a square of 87.5 % of the shorter side, of other images all",
        group="augmentation",
        above=0,
        below=1,
    )
    crop_padding: int = option(
        0,
        "pixels of black around each image, out of which its size is cut at a random place",
        group="augmentation",
        minimum=0,
    )
    rand_augment: int = option(
        0, "operations of RandAugment on each image, such as 2; 0: none", group="augmentation", minimum=0
    )
    rand_augment_magnitude: float = option(
        9.0, f"strength of RandAugment's operations, up to {MOST_MAGNITUDE:g}", group="augmentation", above=0
    )
    flip: str = option(
        "none",
        "flip half of the images: left to right; both: independently upside down too",
        group="augmentation",
        choices=_FLIPS,
    )
    random_erasing: float = option(
        0.0,
        "share of the images of which a random rectangle is erased, such as 0.25",
        group="augmentation",
        minimum=0,
        below=1,
    )
    mixup: float = option(
        0.0,
        "alpha of mixup, such as 0.2: neighbours in the batch, and their labels, are blended; 0: not",
        group="augmentation",
        minimum=0,
    )
    cutmix: float = option(
        0.0,
        "alpha of CutMix, such as 1: a rectangle comes from the neighbour in the batch, and so much of the label; with "
        "mixup each pair of neighbours is mixed by one of the two; 0: not",
        group="augmentation",
        minimum=0,
    )
    label_smoothing: float = option(
        0.0,
        "share of each label that is spread over all classes, such as 0.1; the loss of evaluation is without it",
        group="augmentation",
        minimum=0,
        below=1,
    )
