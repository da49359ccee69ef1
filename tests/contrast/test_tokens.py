"""Tokens lie where their masks say, in 8 bits and in model-ready numbers alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from heatproof.contrast.tokens import SIZES, Token
from heatproof.errors import InputError
from heatproof.images import Preprocess

IDS = [f"{i}.png" for i in range(6)]


def noise(channels: int = 3, side: int = 40) -> torch.Tensor:
    return torch.randint(0, 256, (6, channels, side, side), dtype=torch.uint8)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_a_token_changes_its_pixels_and_no_other(kind: str, channels: int) -> None:
    images = noise(channels)
    planted, masks = Token(kind).plant(images, IDS, seed=3)
    changed = (planted != images).any(1)
    assert not (changed & ~masks).any()
    assert (changed & masks).sum() > 0.9 * masks.sum()
    assert len(set(masks.flatten(1).sum(1).tolist())) == 1
    again, same = Token(kind).plant(images, IDS, seed=3)
    assert torch.equal(planted, again) and torch.equal(masks, same)


@pytest.mark.parametrize("kind", SIZES)
def test_model_ready_pictures_get_the_mark_that_8_bits_get(kind: str) -> None:
    preprocess, images = Preprocess((40, 40), 40), noise()
    planted, masks = Token(kind).plant(images, IDS)
    ready, same = Token(kind).plant(preprocess.normalise(images / 255), IDS, preprocess)
    assert torch.equal(masks, same)
    assert (preprocess.restore(ready) * 255 - planted).abs().max() <= 0.51


def test_places_follow_from_the_id_and_the_seed() -> None:
    images = noise(side=64)
    _, masks = Token().plant(images, IDS)
    assert len({tuple(mask.nonzero()[0].tolist()) for mask in masks}) > 3
    _, alone = Token().plant(images[2:3], IDS[2:3])
    assert torch.equal(alone[0], masks[2])
    _, other = Token().plant(images, IDS, seed=1)
    assert not torch.equal(other, masks)
    corners = torch.cat([Token(size=0.9).plant(images, [f"{k} {i}" for i in IDS])[1] for k in range(20)])
    assert corners[:, :, -1].any() and corners[:, -1].any() and corners[:, 0].any()  # every place is reached


def test_a_picture_of_ones_own_with_its_alpha(tmp_path: Path) -> None:
    own = np.zeros((4, 8, 4), np.uint8)
    own[:, :4] = (255, 0, 0, 255)
    Image.fromarray(own).save(tmp_path / "own.png")
    planted, masks = Token(str(tmp_path / "own.png")).plant(noise(), IDS)
    assert masks.flatten(1).sum(1).tolist() == [16] * 6
    assert (planted.permute(0, 2, 3, 1)[masks] == torch.tensor([255, 0, 0])).all()
    assert Token(str(tmp_path / "own.png"), 0.5).pixels((40, 60)) == (10, 20)


def test_what_cannot_be_a_token_raises_a_clear_error(tmp_path: Path) -> None:
    Image.new("RGBA", (50, 20), (9, 9, 9, 255)).save(tmp_path / "wide.png")
    Image.new("RGBA", (8, 8)).save(tmp_path / "clear.png")
    (tmp_path / "text.png").write_text("no image")
    for token, sentence in (
        (lambda: Token("tga"), "did you mean 'tag'"),
        (lambda: Token("tag", 1.5), "does not fit"),
        (lambda: Token("tag", 0.0), "above 0"),
        (lambda: Token("tag", 0.02).plant(noise(), IDS), "too small"),
        (lambda: Token(str(tmp_path / "wide.png")).plant(noise(), IDS), "larger than the image"),
        (lambda: Token(str(tmp_path / "clear.png")).plant(noise(), IDS), "transparent everywhere"),
        (lambda: Token(str(tmp_path / "text.png")).plant(noise(), IDS), "cannot read the token"),
    ):
        with pytest.raises(InputError, match=sentence):
            token()
