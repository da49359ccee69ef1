"""A commented study for a folder of images, with everything filled in that follows from them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.images import open_source
from heatproof.images.kinds import Guess, guess_source
from heatproof.images.source import Source
from heatproof.verdict.follow import ENOUGH, follow_metric

MODEL = "MODEL"  # to be replaced by the user
MOST_NAMES = 6  # of classes
PARTS_OF_A_CODE = {"finder", "timing", "box"}


def write_starter(
    pictures: Path, out: Path, model: str = "", checkpoint: str = "", head: str = ""
) -> tuple[Path, list[str]]:
    """Write the file, unless it exists, and return facts about the images."""
    if out.exists():
        raise InputError(f"{out} is there already; name another file with --out, or remove it")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}; create it first")
    guess = guess_source(pictures)
    source = open_source(guess.kind, guess.path, **guess.options)
    write_whole({out: starter(guess, source, out.resolve().parent, model, checkpoint, head)})
    return out, facts(guess, source)


def facts(guess: Guess, source: Source) -> list[str]:
    """What is known about the images, a sentence each."""
    lines = [f"{guess.path}: {guess.seen}, {len(source):,} image{'s' * (len(source) != 1)}"]
    if source.labelled:
        counts = Counter(label for sample in source.samples for label in sample.stated)
        names = [f"{source.classes[k]} ({n})" for k, n in sorted(counts.items())[:MOST_NAMES]]
        more = f" and {len(counts) - MOST_NAMES} more" if len(counts) > MOST_NAMES else ""
        plural = "es" * (len(source.classes) != 1)
        lines.append(f"{len(source.classes)} class{plural}: {', '.join(names)}{more}")
        if len(counts) == 1:
            lines.append("all images are of one class, so AUC is left out")
    else:
        lines.append("no labels: put the images of each class into a folder of its own to have them")
    if source.boxed or source.parts:
        lines.append(f"truth: {', '.join(filter(None, ('boxes' * source.boxed, *source.parts)))}")
    if len(source) < ENOUGH:
        lines.append(f"the verdict needs {ENOUGH} images to decide; add {ENOUGH - len(source)} or more")
    return lines


def starter(
    guess: Guess, source: Source, folder: Path, model: str = "", checkpoint: str = "", head: str = ""
) -> str:
    """The study as TOML."""
    classes = {label for sample in source.samples for label in sample.stated}
    vote = follow_metric().name
    metrics = [vote, "insertion(steps=20)", "deletion(steps=20)", "method_agreement"]
    metrics += ["cscore", "accuracy", "recall"] if classes else []
    metrics += ["auc"] if len(classes) > 1 else []
    metrics += ["localise"] if source.boxed or source.parts else []
    metrics += ["structure"] if {*source.parts} >= PARTS_OF_A_CODE else []
    count = f"num_classes = {len(source.classes)}  " if source.labelled and not checkpoint else ""
    path = Path(os.path.relpath(guess.path.resolve(), folder)).as_posix()
    lines = [
        f"# {'; '.join(facts(guess, source))}.",
        "# Check it with: heatproof run THIS-FILE --dry-run      then run it without --dry-run.",
        "",
        "# Names as in `heatproof list methods`; random, edges and centre never look at the network.",
        'methods = ["gradcam", "layercam", "hirescam", "gradient", "random", "edges", "centre"]',
        f"# As in `heatproof list metrics`; the verdict rests on {vote}, the others are information.",
        f"metrics = {json.dumps(metrics)}",
        "",
        "[model]",
        "# torchvision:NAME, timm:NAME, hf:FOLDER, keras:NAME, FILE.py:FUNCTION or lite0",
        f"spec = {json.dumps(model or MODEL)}" + "  # <- fill in" * (not model),
        '# Your weights; several, or a pattern such as "epochs/*.pt", for a whole training.',
        f"checkpoints = {json.dumps(checkpoint)}"
        if checkpoint
        else '# checkpoints = "best.pt"  # <- fill in',
        "# pretrained = true       instead: the library's own weights, which are downloaded",
        f"# {count}where neither the weights nor the library say it" if count else '# layer = "layer4"',
        f"head = {json.dumps(head)}"
        if head
        else 'head = "multilabel"  # where the network returns logits'
        if source.is_multilabel
        else '# head = "regression"     its output, where that is not found by itself; see docs/heads.md',
        "",
        "[images]",
        f"kind = {json.dumps(guess.kind)}",
        f"path = {json.dumps(path)}",
        *(f"options.{key} = {json.dumps(value)}" for key, value in guess.options.items()),
        "# limit = 100             at most so many, classes in proportion",
        '# options.class_names = ["a", "b"]    the classes in the order of the model, where it is not sorted',
        "",
        "[run]",
        f"batch_size = {min(8, len(source))}            # images per unit: what Ctrl-C waits for",
        f'# targets = "predicted"   explain the network\'s answer{" instead of the label" * bool(classes)}',
        '# device = "cuda"         a GPU is taken where there is one',
    ]
    return "\n".join(lines) + "\n"
