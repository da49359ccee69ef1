"""A CLIP model trained on drawn shapes with captions, and heatmaps of its classes, which are prompts.

    python examples/zero_shot.py [--steps 200] [--out zero-shot]

Written to the folder --out:
    clip/           the model with its tokenizer and image processor, for hf:zero-shot/clip
    images/red/     images with one shape, in a folder for each colour; also green/ and blue/
    two.png         an image with a red and a blue square
    panel.png       its maps for the prompts "a photo of a red square" and "a photo of a blue square"

The model is small and knows nothing but colours and shapes. With weights of your own, only the last part of
main() is needed: load_model with prompts, and explain.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import cross_entropy

import heatproof as hp
from heatproof.report.panels import Tile, panel

COLOURS = {"red": (235, 50, 40), "green": (40, 190, 70), "blue": (50, 80, 240)}
SHAPES = ("disc", "square", "cross")
CAPTIONS = {(colour, shape): f"a photo of a {colour} {shape}" for colour, shape in product(COLOURS, SHAPES)}
SIDE, PATCH, RADIUS, IMAGES, BATCH = 32, 4, 5, 500, 64
METHODS = ["gradcam", "layercam", "attnlrp", "occlusion"]
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL = {"pad_token": "[PAD]", "bos_token": "[BOS]", "unk_token": "[UNK]", "eos_token": "[EOS]"}


def main(arguments: list[str] | None = None) -> dict[str, dict[str, hp.Maps]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("zero-shot"))
    given = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    train(rng, given.steps, given.out / "clip")
    for colour in COLOURS:
        (given.out / "images" / colour).mkdir(parents=True, exist_ok=True)
        for i in range(12):
            one = draw(rng, [(colour, SHAPES[i % 3], place(rng))])
            Image.fromarray(one).save(given.out / "images" / colour / f"{i:02d}.png")
    two = Image.fromarray(draw(rng, [("red", "square", (8, 10)), ("blue", "square", (23, 22))]))
    two.save(given.out / "two.png")

    # What a user writes: classes are prompts. The image holds both squares; each prompt has its own map.
    prompts = [f"{colour}: a photo of a {colour} square" for colour in COLOURS]
    model = hp.load_model(f"hf:{given.out / 'clip'}", prompts=prompts)
    images = model.see([given.out / "two.png"])
    results = {name: hp.explain(model, images, METHODS, k) for k, name in enumerate(model.classes or ())}
    tiles = []
    for name in ("red", "blue"):
        tiles.append(Tile(enlarged(two), f'"a photo of a {name} square"', "what the model sees"))
        for method, maps in results[name].items():
            tiles.append(Tile(enlarged(maps.overlay(images, model.preprocess)[0]), method, name))
    panel(tiles, columns=1 + len(METHODS)).save(given.out / "panel.png")
    return results


def draw(rng: np.random.Generator, shapes: list[tuple[str, str, tuple[int, int]]]) -> np.ndarray:
    """Shapes (colour, form, centre as x and y) on a noisy grey ground, 8 bits."""
    canvas = 128 + 12 * rng.standard_normal((SIDE, SIDE, 3))
    for colour, form, centre in shapes:
        canvas[mask(form, centre)] = COLOURS[colour]
    return canvas.clip(0, 255).astype(np.uint8)


def mask(form: str, centre: tuple[int, int]) -> np.ndarray:
    y, x = np.indices((SIDE, SIDE))
    across, down = abs(x - centre[0]), abs(y - centre[1])
    near, far = np.minimum(across, down), np.maximum(across, down)
    inside = {
        "disc": np.hypot(across, down) <= RADIUS,
        "square": far < RADIUS,
        "cross": (near <= 1) & (far <= RADIUS),
    }
    return inside[form]


def place(rng: np.random.Generator) -> tuple[int, int]:
    x, y = rng.integers(RADIUS, SIDE - RADIUS, 2)
    return int(x), int(y)


def train(rng: np.random.Generator, steps: int, folder: Path) -> None:
    """Train CLIP to find the caption of an image among all captions, and save it with its tokenizer."""
    torch.manual_seed(0)
    words = tokenizer()
    texts = words(list(CAPTIONS.values()), padding=True, return_tensors="pt")
    options = {"vocab_size": len(words), "max_position_embeddings": 16, "projection_dim": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}  # 2 has another meaning in CLIP
    config = transformers.CLIPConfig(
        text_config=TINY | options | tokens,
        vision_config=TINY | {"image_size": SIDE, "patch_size": PATCH, "projection_dim": 16},
        projection_dim=16,
    )
    network = transformers.CLIPModel(config).train()
    kinds = [list(CAPTIONS)[i] for i in rng.integers(len(CAPTIONS), size=IMAGES)]
    drawn = np.stack([draw(rng, [(*kind, place(rng))]) for kind in kinds])
    images = (torch.from_numpy(drawn).movedim(-1, 1) / 255 - 0.5) / 0.25
    captions = torch.tensor([list(CAPTIONS).index(kind) for kind in kinds])
    optimiser = torch.optim.AdamW(network.parameters(), 2e-3)
    for _ in range(steps):
        batch = torch.from_numpy(rng.integers(IMAGES, size=BATCH))
        logits: Tensor = network(pixel_values=images[batch], **texts).logits_per_image
        optimiser.zero_grad()
        cross_entropy(logits, captions[batch]).backward()
        optimiser.step()
    size = {"height": SIDE, "width": SIDE}
    network.save_pretrained(folder)
    words.save_pretrained(folder)
    transformers.CLIPImageProcessor(
        size=size, crop_size=size, image_mean=[0.5] * 3, image_std=[0.25] * 3
    ).save_pretrained(folder)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each word of the captions; a real model brings its own tokenizer."""
    words = sorted({word for caption in CAPTIONS.values() for word in caption.split()})
    numbers = {word: i for i, word in enumerate([*SPECIAL.values(), *words])}
    own = Tokenizer(models.WordLevel(numbers, unk_token=SPECIAL["unk_token"]))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, **SPECIAL)


def enlarged(image: Image.Image) -> Image.Image:
    return image.resize((180, 180), Image.Resampling.NEAREST)


if __name__ == "__main__":
    main()
