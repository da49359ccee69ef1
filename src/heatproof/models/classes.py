"""Class names that come with installed packages."""

from __future__ import annotations

from functools import cache

from heatproof.errors import MissingExtraError, need


@cache
def imagenet_classes() -> tuple[str, ...] | None:
    """The 1,000 ImageNet names as torchvision or timm writes them, None where neither is installed."""
    for read in (_from_torchvision, _from_timm):
        try:
            return read()
        except (MissingExtraError, AttributeError, KeyError):  # absent, broken, or of a version without them
            continue
    return None


def _from_torchvision() -> tuple[str, ...]:
    models = need("torchvision.models", "torchvision")
    return tuple(models.get_model_weights("resnet18").DEFAULT.meta["categories"])


def _from_timm() -> tuple[str, ...]:
    info = need("timm.data", "timm").ImageNetInfo("imagenet-1k")
    # The first of several synonyms: "tench, Tinca tinca" is a tench.
    return tuple(info.index_to_description(i).split(",")[0] for i in range(info.num_classes()))
