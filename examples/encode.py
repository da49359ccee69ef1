"""What makes a picture similar to a prototype, to another picture, or to a text: encoders without classes.

    python examples/encode.py [PICTURE ...] [--clip FOLDER] [--out heads]

A ViT encoder (Hugging Face's, random weights) is asked about its similarity to prototypes. CLIP is asked
about texts: with --clip a folder that holds a saved CLIP model and its tokeniser, else random weights and
random texts, so that nothing is downloaded; the maps then mean nothing, and this shows how to ask.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from torch import Tensor

import heatproof as hp
from heatproof.images.files import named_file
from heatproof.images.preprocess import Preprocess

PHOTOGRAPHS = ("example:cat", "example:coffee")
TEXTS = ("a photo of a cat", "a photo of a cup of coffee")
METHODS = ["gradcam", "rollout", "attnlrp"]
SIDE = 64
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def main(arguments: list[str] | None = None) -> dict[str, hp.Maps]:
    parser = argparse.ArgumentParser()
    parser.add_argument("pictures", nargs="*", type=Path)
    parser.add_argument("--clip", type=Path)
    parser.add_argument("--out", type=Path, default=Path("heads"))
    given = parser.parse_args(arguments)
    pictures = given.pictures or [named_file(name) for name in PHOTOGRAPHS]
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    results = {}

    # Prototypes: the mean vector of a class's pictures; here one picture each. Each is a target.
    config = transformers.ViTConfig(image_size=SIDE, patch_size=8, **TINY)
    encoder = hp.load_model(transformers.ViTModel(config).eval(), preprocess=Preprocess((SIDE, SIDE), SIDE))
    images = encoder.see(pictures)
    prototypes = encoder.embeddings(images.flip(-1))  # the same pictures, mirrored
    similar = hp.load_model(encoder, head="embedding", references=prototypes)
    results |= show("prototype", similar, images, given.out)

    # Texts: the same space by CLIP's training. Which text is the nearest is what is explained.
    vision, texts, side = clip(given.clip)
    named = hp.load_model(
        vision,
        head="embedding",
        references=texts,
        classes=TEXTS,
        preprocess=Preprocess((side, side), side, MEAN, STD),
    )
    results |= show("text", named, named.see(pictures), given.out)
    return results


def clip(folder: Path | None) -> tuple[torch.nn.Module, Tensor, int]:
    """CLIP's picture encoder, the vectors of the texts, and the side of its pictures."""
    if folder is not None:
        seeing = transformers.CLIPVisionModelWithProjection.from_pretrained(folder)
        reading = transformers.CLIPTextModelWithProjection.from_pretrained(folder)
        words = transformers.AutoTokenizer.from_pretrained(folder)(
            list(TEXTS), padding=True, return_tensors="pt"
        )
    else:
        seen = transformers.CLIPVisionConfig(image_size=SIDE, patch_size=8, projection_dim=16, **TINY)
        read = transformers.CLIPTextConfig(
            vocab_size=99, projection_dim=16, bos_token_id=1, eos_token_id=98, **TINY
        )
        seeing = transformers.CLIPVisionModelWithProjection(seen)
        reading = transformers.CLIPTextModelWithProjection(read)
        words = {"input_ids": torch.tensor([[1, 7, 9, 98], [1, 5, 3, 98]])}
    with torch.no_grad():
        vectors = reading.eval()(**words).text_embeds
    return seeing.eval(), vectors, seeing.config.image_size


def show(question: str, model: hp.Model, images: Tensor, out: Path) -> dict[str, hp.Maps]:
    """Explain the nearest reference, score the maps, and write them over the pictures."""
    method_maps = hp.explain(model, images, METHODS)
    curves = hp.metrics.insertion_deletion(method_maps, model=model, images=images, steps=8)
    print(f"{question}: the network's output is {model.head_meaning}")
    print(f"  similarities {[[round(v, 3) for v in row] for row in model.logits(images).tolist()]}")
    for method, maps in method_maps.items():
        areas = [round(v, 3) for v in curves[method].insertion_auc.tolist()]
        why = next(filter(None, curves[method].scores.reasons("insertion")), "")
        print(f"  {method:10} insertion {areas} {why}")
        for i, picture in enumerate(maps.overlay(images, model.preprocess)):
            picture.save(out / f"{question}.{i}.{method}.png")
    return {f"{question} {method}": maps for method, maps in method_maps.items()}


if __name__ == "__main__":
    main()
