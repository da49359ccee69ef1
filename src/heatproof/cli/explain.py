"""heatproof explain: heatmaps of a network for some images, as overlays and panels."""

from __future__ import annotations

import glob
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from PIL import Image

from heatproof.cli._console import PATH, Steps, console, errors, new_table, say, steps
from heatproof.cli._study import arguments, settings_options
from heatproof.disk import clear_failure
from heatproof.errors import InputError, ModelError, TargetError, did_you_mean
from heatproof.images.files import DICOM_SUFFIXES, EXAMPLES, named_file, suffixes
from heatproof.images.kinds import is_nifti_name, open_seen
from heatproof.models.names import KERAS_FILES, LITE, read_lines
from heatproof.registry import check_methods, split_calls
from heatproof.show import COLOUR_MAPS, hottest, overlay, pixels, plane_words, sections
from heatproof.studies.settings import HEAD, PROMPT, PROMPTS, PreprocessSettings, numbers, read_window

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from heatproof.models.model import Model

ARRAYS = (".npy", ".npz", ".nii", ".nii.gz")  # of any number of channels
SPACING = "spacing is three lengths in mm, such as 1,1,1"
IMAGES_AT_ONCE = 8  # explained together: enough to fill a CPU, few enough to see progress


@dataclass(frozen=True)
class Explained:
    """An image with the data of its overlays and its rows in the table."""

    name: str  # of its files, unique in the run
    chances: dict[int, float]  # by class: its probability, or its value where the head has none
    target: int
    input: Image.Image  # what the model sees, in 8 bits
    heat: dict[str, Tensor]  # method -> "H W" in [0, 1]
    about: str  # the input


@click.command("explain")
@click.argument("model")
@click.option("--checkpoint", type=PATH, help="Weights: safetensors or torch.")
@click.option("--random-weights", is_flag=True, help="Use random weights.")
@click.option("--classes", type=PATH, help="Class names: a text file, one per line.")
@click.option("--prompt", multiple=True, help=PROMPT)
@click.option("--prompts", type=PATH, help=PROMPTS)
@click.option("--allow-pickle", is_flag=True, help="Allow the checkpoint to run code. Only if you trust it.")
@click.option("--head", help=HEAD)
@click.option("--references", type=PATH, help="For an embedding: reference vectors, a .npy file.")
@click.option("--device", help="cpu, cuda, cuda:1, ...; default: a GPU if available.")
@click.argument("images", nargs=-1, required=True)
@click.option(
    "--methods", "-m", default="gradcam,layercam,eigencam",
    help='Comma-separated, options in brackets: "gradcam,lime(samples=200)".',
)  # fmt: skip
@click.option("--target", "-t", help="Class to explain, by number or name; the prediction by default.")
@click.option("--layer", "-l", help="Layer of CAMs; several with commas. Chosen automatically by default.")
@click.option("--out", "-o", type=PATH, default=Path("heatmaps"), help="Folder.")
@click.option("--top", type=click.IntRange(min=1), default=5, help="Predictions to list.")
@click.option("--cmap", type=click.Choice(list(COLOUR_MAPS)), default="inferno", help="Colours.")
@click.option("--alpha", type=click.FloatRange(0, 1), default=0.6, help="Weight of the map's colours.")
@click.option(
    "--batch-size", type=click.IntRange(1), help="Inputs per pass; chosen automatically by default."
)
@click.option(
    "--bits", type=click.IntRange(8, 16),
    help="Used bits of 16-bit grey images; by default inferred from their values.",
)  # fmt: skip
@click.option(
    "--window",
    help="For scans, the values mapped to 0 to 1: centre and width, such as 40,400, or range for their own.",
)
@settings_options(PreprocessSettings)
@click.option("--spacing", help="For scans, the voxel size: three lengths in mm, such as 1,1,1.")
@click.option("--seed", type=int, default=0, help="For methods that draw random numbers.")
@click.pass_context
def explain_command(
    ctx: click.Context, model: str, images: tuple[str, ...], methods: str, target: str | None,
    layer: str | None, out: Path, top: int, cmap: str, alpha: float, batch_size: int | None,
    bits: int | None, window: str | None, spacing: str | None, size: str | None, resize: str | None,
    mean: str | None, std: str | None, seed: int, **choice: Any,
) -> None:  # fmt: skip
    """Compute heatmaps of MODEL for one or more IMAGES.

    MODEL is torchvision:NAME, timm:NAME, hf:FOLDER, keras:NAME, monai:NAME, onnx:FILE, FILE.py:FACTORY or
    lite0 (an ImageNet classifier that needs no download). IMAGES are files (DICOM, and for networks that take
    them NIfTI and .npy), folders, quoted patterns or photographs that come with heatproof (example:cat,
    astronaut, coffee, rocket). Each goes through the model's preprocessing; the maps are drawn over the
    network's input, for a volume over the three planes with the highest mean map value.

    \b
    Written to the folder --out, for each image:
      NAME.METHOD.png     the map over the image
      NAME.panel.png      the image and every map, side by side

    \b
    Examples:
      heatproof explain lite0 example:cat
      heatproof explain lite0 photos/ "more/*.jpg" --methods "gradcam++,lime(samples=50)" --out maps
      heatproof explain lite0 example:cat --target "tiger cat"
      heatproof explain torchvision:resnet50 scan.png --checkpoint best.pt --classes names.txt
      heatproof explain hf:clip photo.jpg --prompt "cat: a photo of a cat" --prompt "dog: a photo of a dog"
      heatproof explain monai:DenseNet121 ct.nii.gz --checkpoint best.pt --window 40,400

    An image that cannot be used is reported and skipped; the exit code is then 1.
    """
    check_methods(split_calls(methods))
    replaced = {"size": size, "resize": resize, "mean": mean, "std": std}
    preprocess = PreprocessSettings(
        **arguments(PreprocessSettings, {k: v for k, v in replaced.items() if v})
    ).table
    paths = find_images(images)
    if not any(path.exists() for path in paths):
        raise InputError(f"there is no file {paths[0]}; name image files, folders of them or quoted patterns")
    from heatproof.run.config import check_network

    weights = None if choice["random_weights"] else choice["checkpoint"]
    check_network(model, [weights] if weights else [])  # before torch is imported, which takes its time
    from heatproof.run.checks import input_warnings

    loaded = open_model(model, **choice)
    preprocess |= {"window": read_window(window)} if window else {}
    preprocess |= {"spacing": numbers(spacing, SPACING)} if spacing else {}
    loaded = replace(loaded, preprocess=loaded.preprocess.replaced(preprocess))
    own = weights is None and not model.partition(":")[0].endswith(".py")  # come with their preprocessing
    say(f"the network's input: {loaded.preprocess.description}")
    for warning in input_warnings(loaded, paths, preprocess, own):
        say(f"warning: {warning}")
    if not any(path.name.lower().endswith(ARRAYS) for path in paths):
        loaded.check_channels()
    options = {
        "methods": split_calls(methods),
        "targets": read_target(target, loaded),
        "layer": layer.split(",") if layer and "," in layer else layer,
        "seed": seed,
        "batch_size": batch_size,
    }
    with clear_failure(out):
        out.mkdir(parents=True, exist_ok=True)
    named = list(zip(unique_names(paths), paths, strict=True))
    at_once = batch_size or IMAGES_AT_ONCE
    written: list[Path] = []
    explained: list[Explained] = []
    with steps("explaining", len(named)) as progress:
        for start in range(0, len(named), at_once):
            for image in explain_some(loaded, named[start : start + at_once], bits, options, progress):
                written += draw(loaded, image, out, cmap, alpha)
                explained.append(replace(image, heat={}))  # the maps are on disk
                progress.done(image.name)
    if explained:
        console.print(prediction_table(loaded, explained, top))
        say(f"the network's output: {loaded.head_meaning}")
        say(f"{len(explained)} of {len(named)} images explained; written to {out}:")
        say("\n".join(f"  {path}" for path in written))
    if len(explained) < len(named):
        ctx.exit(1)


def find_images(given: Sequence[str]) -> list[Path]:
    """Files by name: a folder means the images in it, a pattern the files that match."""
    paths: list[Path] = []
    for text in given:
        path = named_file(text).expanduser()
        if path.is_dir():
            known = suffixes() | set(DICOM_SUFFIXES)
            matches = sorted(p for p in path.iterdir() if p.suffix.lower() in known or is_nifti_name(p))
        elif not path.exists() and glob.has_magic(text):
            matches = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        else:
            matches = [path]  # a file that does not exist is reported like one that cannot be read
        if not matches:
            raise InputError(f"no image in {text!r}; name image files, a folder of them or a quoted pattern")
        paths += matches
    return list(dict.fromkeys(paths))


def unique_names(paths: Sequence[Path]) -> list[str]:
    """A name for the files written about each image; a number distinguishes equal ones."""
    examples = {named_file(f"example:{name}"): name for name in EXAMPLES}
    count: Counter[str] = Counter()
    names = []
    for path in paths:
        stem = examples.get(path, path.stem)
        count[stem] += 1
        names.append(stem if count[stem] == 1 else f"{stem}-{count[stem]}")
    return names


def explain_some(
    model: Model,
    named: Sequence[tuple[str, Path]],
    bits: int | None,
    options: dict[str, Any],
    progress: Steps,
) -> list[Explained]:
    """Explain the images that can be read and for which the network's output is finite."""
    from torch import from_numpy, stack

    from heatproof.explain.api import explain

    def leave_out(why: str) -> None:
        errors.print(f"not explained: {why}", style="red", soft_wrap=True)
        progress.done(None)

    ready: dict[str, Tensor] = {}
    for name, path in named:
        try:
            ready[name] = model.preprocess(open_seen(path, bits, volume=len(model.preprocess.size) > 2))
        except InputError as error:
            leave_out(str(error))
    if not ready:
        return []
    images = stack(list(ready.values()))
    model.check_repeatable(images[:2])
    maps = explain(model, images, **options, progress=progress.inputs, allow_nan=True)
    chances = answers(model, images, options["targets"])
    if model.classes is not None and len(chances[0]) > 1 and len(model.classes) != len(chances[0]):
        raise InputError(
            f"there are {len(model.classes)} class names but {model.name} has {len(chances[0])} classes; "
            "give --classes a file with one name per class"
        )
    targets = next(iter(maps.values())).explained.tolist()
    heat = {method: of_method.for_display() for method, of_method in maps.items()}
    explained = []
    for i, name in enumerate(ready):
        own = {method: values[i] for method, values in heat.items()}
        if not all(map(math.isfinite, chances[i].values())):
            leave_out(f"{name}: the network's output is NaN or infinite for this image")
            continue
        if not all(math.isfinite(float(values.sum())) for values in own.values()):
            leave_out(f"{name}: a map of it has NaN or infinite values")
            continue
        planes, about = None, "what the model sees"
        if images.ndim > 4:  # of a volume, the planes with most heat
            at = hottest(sum(own.values()))
            planes, about = [at], plane_words(at)
            own = {method: from_numpy(sections(values, at)) for method, values in own.items()}
        view = Image.fromarray(pixels(images[i : i + 1], model.preprocess, planes)[0])
        explained.append(Explained(name, chances[i], targets[i], view, own, about))
    return explained


def answers(model: Model, images: Tensor, targets: Any) -> list[dict[int, float]]:
    """The network's output for each image: of all classes, or of the region or box that is explained."""
    from heatproof.models.heads import Columns
    from heatproof.models.model import bind_targets

    bound, columns = bind_targets(model, images, targets)
    logits = bound.logits(images)
    if isinstance(columns, Columns):
        values, labels = bound.measured(logits, columns.numbers), bound.head.labels(columns.numbers)
        return [{c: p} for c, p in zip(labels.tolist(), values.tolist(), strict=True)]
    table = bound.probabilities(logits) if bound.head.chance else logits
    return [dict(enumerate(row)) for row in table.tolist()]


def chance_text(model: Model, number: float) -> str:
    """A probability in per cent, or a plain value."""
    return f"{number:.1%}" if model.head.chance else f"{number:.4g}"


def draw(model: Model, image: Explained, out: Path, cmap: str, alpha: float) -> list[Path]:
    """Write the overlays and the panel of an image."""
    from heatproof.report.panels import Tile, explains, panel

    def class_text(c: int) -> str:
        return f"{class_name(model, c)}, {chance_text(model, image.chances[c])}"

    guess = max(image.chances, key=lambda c: image.chances[c]) if model.head.chance else image.target
    note = f"explains {class_text(image.target)}"
    tiles = [Tile(image.input, "original", image.about)]
    files = []
    for method, heat in image.heat.items():
        blended = overlay(image.input, heat, cmap, alpha)
        files.append(save(blended, out / f"{image.name}.{file_part(method)}.png"))
        tiles.append(Tile(blended, method, note if heat.any() else f"{note}: the map is constant"))
    heading = f"{image.name}, seen by {model.name}, {explains(image.target, None, guess, class_text)}"
    return [*files, save(panel(tiles, heading=heading, cmap=cmap), out / f"{image.name}.panel.png")]


def file_part(method: str) -> str:
    """A method as part of a file's name.

    >>> file_part("lime(samples=200, segments='slic')")
    'lime_samples=200_segments=slic'
    """
    return re.sub(r"[^\w+.=-]+", "_", re.sub("['\"]", "", method)).strip("_")


def save(image: Image.Image, path: Path) -> Path:
    with clear_failure(path):
        image.save(path)
    return path


def prediction_table(model: Model, explained: Sequence[Explained], top: int) -> Table:
    """The most likely classes of each image; the explained class is marked, and added if missing."""
    chance = "probability" if model.head.chance else "value"
    columns = ("image", "class", "name", chance, "")
    table = new_table(f"predictions of {model.name}", columns, right=("class", chance))
    for image in explained:
        ranked = sorted(image.chances, key=lambda c: -image.chances[c])[:top]
        rows = ranked if image.target in ranked else [*ranked, image.target]
        for number in rows:
            name, mark = image.name * (number == rows[0]), "explained" * (number == image.target)
            texts = str(number), class_name(model, number), chance_text(model, image.chances[number])
            table.add_row(name, *texts, mark, end_section=number == rows[-1])
    return table


def open_model(
    spec: str, checkpoint: Path | None, random_weights: bool, classes: Path | None, prompt: Sequence[str],
    prompts: Path | None, **options: Any,
) -> Model:  # fmt: skip
    """The model that the options name; without a checkpoint, with pretrained weights."""
    from heatproof.models.load import best_device, load_model

    if random_weights and checkpoint is not None:
        raise InputError("--random-weights and --checkpoint exclude each other; leave one out")
    if random_weights and (
        spec.lower() in LITE or spec.startswith(("hf:", "onnx:")) or spec.endswith(KERAS_FILES)
    ):
        raise InputError(f"{spec} brings its own weights; leave out --random-weights")
    options["device"] = best_device(options["device"])
    options["pretrained"] = pretrained = checkpoint is None and not random_weights
    options["classes"] = read_lines(classes) if classes else None
    options["prompts"] = [*prompt, *(read_lines(prompts) if prompts else ())] or None
    try:
        return load_model(spec, checkpoint, **options)
    except ModelError as error:
        if not pretrained or spec.partition(":")[0] not in ("torchvision", "timm", "keras"):
            raise
        reason = str(error).partition("; get the weights elsewhere")[0]
        raise ModelError(
            f"{reason}; name weights you have with --checkpoint FILE, or use --random-weights to see the "
            "methods run on an untrained network"
        ) from error


def class_name(model: Model, number: int) -> str:
    """The name of a class, or its number if the model has no names."""
    names = model.classes
    return names[number] if names and number < len(names) else model.head.called(number)


def read_target(text: str | None, model: Model) -> int | None:
    """A class by number or name; a name may be one of the synonyms ImageNet lists for a class."""
    if text is None:
        return None
    with suppress(ValueError):
        return int(text)
    if model.classes is None:
        raise TargetError(f"{model.name} has no class names; give a class number instead of {text!r}")
    wanted, names = text.strip().casefold(), [name.casefold() for name in model.classes]
    whole = [i for i, name in enumerate(names) if name == wanted]
    matches = whole or [i for i, name in enumerate(names) if wanted in map(str.strip, name.split(","))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        listed = ", ".join(f"{i} ({model.classes[i]})" for i in matches)
        raise TargetError(f"{text!r} matches several classes: {listed}; give a number")
    synonyms = [word.strip() for name in model.classes for word in name.split(",")]
    raise TargetError(f"{model.name} has no class {text!r}; {did_you_mean(text, synonyms)}")
