"""Image-text models (CLIP, SigLIP, ALIGN) as image classifiers whose classes are prompts.

The text encoder runs once. The vector of a prompt becomes a row of a linear layer behind the image's vector:

    logit of a prompt = scale * cosine(image, prompt) + bias

Scale and bias are the model's own; CLIP and ALIGN have no bias. Methods, random weights and folding work on
it as on any classifier. Vectors of several prompts of a class are averaged and normalised.
Cite: radford2021learning, section 3.1.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from heatproof.errors import InputError, ModelError

AGREEMENT = 1e-3  # relative difference from the logits of the whole model that rounding may cause
SAME = 1e-5  # difference from 1 of the cosine of two texts that a model does not distinguish


class PromptClassifier(nn.Module):
    """Image encoder of an image-text model with a linear layer of prompts; weight: "k d"."""

    def __init__(self, network: Any, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.config = network.vision_model.config
        self.vision_model = network.vision_model
        self.visual_projection = getattr(network, "visual_projection", nn.Identity())
        self.head = nn.Linear(weight.shape[1], len(weight), bias is not None)
        self.head.weight = nn.Parameter(weight)
        if bias is not None:
            self.head.bias = nn.Parameter(bias.expand(len(weight)).clone())

    def forward(self, images: Tensor) -> Tensor:
        vectors = self.visual_projection(self.vision_model(pixel_values=images).pooler_output)
        return self.head(normalize(vectors, dim=1))  # type: ignore[no-any-return]


def read_prompts(prompts: Sequence[str] | Mapping[str, str]) -> list[tuple[str, str]]:
    """Class and text of each prompt: "class: text", or a text that is also the name of its class.

    >>> read_prompts(["cat: a photo of a cat", "a dog"])
    [('cat', 'a photo of a cat'), ('a dog', 'a dog')]
    """
    if isinstance(prompts, Mapping):
        prompts = [f"{name}: {text}" for name, text in prompts.items()]
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise InputError(f"prompts is a list of texts, one for each class; got {prompts!r}")
    parts = [[part.strip() for part in prompt.split(":", 1)] for prompt in prompts]
    if empty := [prompt for prompt, own in zip(prompts, parts, strict=True) if not all(own)]:
        raise InputError(
            f"the prompt {empty[0]!r} lacks its text or its class; write 'class: text' or a text"
        )
    if len({own[0] for own in parts}) < 2:
        raise InputError(
            f"a classifier needs prompts for two or more classes, got {list(prompts)}; add others"
        )
    return [(own[0], own[-1]) for own in parts]


@torch.no_grad()
def prompt_classifier(
    network: Any, tokenizer: Any, prompts: Sequence[tuple[str, str]], images: Tensor
) -> tuple[PromptClassifier, tuple[str, ...]]:
    """An image-text model as a classifier with the names of its classes.

    Args:
        network: from transformers.AutoModelForZeroShotImageClassification.
        tokenizer: the network's own.
        prompts: from read_prompts.
        images: "b c H W", for which the classifier must return the logits of the network.
    """
    texts = [text for _, text in prompts]
    most = network.config.text_config.max_position_embeddings
    for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True):
        if len(ids) > most:
            raise InputError(f"the prompt {text!r} has {len(ids)} tokens, the model takes {most}; shorten it")
    # SigLIP was trained with padded texts and without a mask.
    fixed = "siglip" in network.config.model_type
    padding: dict[str, Any] = {"padding": "max_length", "max_length": most} if fixed else {"padding": True}
    encoded = tokenizer(texts, return_tensors="pt", **padding)
    known = ("input_ids",) if fixed else ("input_ids", "attention_mask")
    output = network(pixel_values=images, **{name: encoded[name] for name in known})
    vectors, logits = output.text_embeds, output.logits_per_image
    for (name, text), row in zip(prompts, vectors @ vectors.T, strict=True):
        other = int((row > 1 - SAME).int().argmax())
        if name != prompts[other][0]:
            raise ModelError(
                f"the model does not distinguish {text!r} from {texts[other]!r}; change a prompt, or save "
                "its own tokenizer in its folder"
            )
    scale = network.logit_scale.exp() if hasattr(network, "logit_scale") else 1 / network.temperature
    bias = getattr(network, "logit_bias", None)
    whole = PromptClassifier(network, vectors * scale, bias)(images)
    if not torch.allclose(whole, logits, AGREEMENT, AGREEMENT * float(scale)):
        raise ModelError(f"{type(network).__name__} does not compare images and texts by their cosine")
    names = tuple(dict.fromkeys(name for name, _ in prompts))
    means = [vectors[[own == name for own, _ in prompts]].mean(0) for name in names]
    return PromptClassifier(network, normalize(torch.stack(means), dim=1) * scale, bias), names
