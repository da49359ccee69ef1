"""A commented study (starter.toml) for a folder of images, with what follows from them filled in."""

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
from heatproof.report.pieces import TEMPLATES
from heatproof.verdict.follow import ENOUGH, follow_metric

MOST_NAMES = 6  # of classes
PARTS_OF_A_CODE = {"finder", "timing", "box"}


def write_starter(
    pictures: Path, out: Path, model: str = "", checkpoint: str = "", head: str = ""
) -> tuple[Path, list[str]]:
    """Write the file, unless it exists, and return facts about the images."""
    if out.exists():
        raise InputError(f"{out} exists already; name another file with --out, or remove it")
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
    content = {
        "facts": facts(guess, source), "vote": vote, "metrics": metrics, "model": model, "head": head,
        "checkpoint": checkpoint, "source": source, "guess": guess, "classes": classes, "quoted": json.dumps,
        "path": Path(os.path.relpath(guess.path.resolve(), folder)).as_posix(),
    }  # fmt: skip
    return TEMPLATES.get_template("studies/audit/starter.toml").render(content) + "\n"
