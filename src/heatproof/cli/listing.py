"""heatproof list: methods, metrics, and the layers of a network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import click

from heatproof.cli._console import console, new_table, say
from heatproof.errors import InputError
from heatproof.registry import REPEATS, Explainer, Metric, explainers, metrics
from heatproof.run.config import read_metrics

NETWORKS = {"cnn": "convolutional networks", "transformer": "transformers"}
VERDICT = {  # by a metric's question, and whether it votes
    ("map", True): "votes on whether maps follow the network",
    ("map", False): "information about maps",
    ("network", True): "measures what the network uses",
}


@click.group("list")
def list_command() -> None:
    """List methods, metrics, or the layers of a network.

    \b
    Examples:
      heatproof list methods
      heatproof list methods -v            with the conventions of each method
      heatproof list metrics
      heatproof list layers torchvision:resnet50
    """


@list_command.command("methods")
@click.option("--verbose", "-v", is_flag=True, help="Also options, conventions and citation.")
def list_methods(verbose: bool) -> None:
    """List the explanation methods with summary, cost and source.

    "shared pass": one forward and one partial backward pass serve all of these methods together. "inputs":
    inputs through the network per image, by default.

    \b
    Examples:
      heatproof list methods
      heatproof list methods -v            options, conventions and citation of each
    """
    if verbose:
        for entry in explainers:
            say(method_page(entry))
        return
    methods = [(entry.name, cost(entry), entry.summary) for entry in explainers]
    show_table("explanation methods", ("method", "cost per image", "idea"), methods)
    console.print(
        'Options go in brackets: --methods "lime(samples=200)". All of them: heatproof list methods -v'
    )
    from heatproof.explain.providers import PACKAGES, is_installed, offered  # which imports torch

    others = []
    for prefix in PACKAGES:
        there = "yes" if is_installed(prefix) else f"no: pip install {prefix}"
        others.append((f"{prefix}:NAME", there, ", ".join(offered(prefix))))
    show_table("methods of other packages", ("write", "installed", "names"), others)
    console.print(
        "Your own: FILE.py:FUNCTION, a function (model, images, targets) -> maps; files:FOLDER, stored maps"
    )


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows whose last cell may take several lines."""
    table = new_table(title, columns, rows)
    for column in table.columns[:-1]:
        column.no_wrap = True
    console.print(table)


def method_page(entry: Explainer) -> str:
    """Everything about one method, one fact per line."""
    facts = {"idea": entry.summary, "also called": ", ".join(entry.aliases), "cost per image": cost(entry)}
    facts["only for"] = NETWORKS.get(entry.architecture, "")
    facts["options"] = ", ".join(f"{name}={value}" for name, value in entry.options.items())
    return page(entry.name, facts | vars(entry.card) | {"citation": entry.cite})


def cost(entry: Explainer) -> str:
    """Cost of a method beyond the shared pass."""
    for option in REPEATS:
        if option in entry.options:
            return f"{entry.options[option]:,} inputs"
    if entry.cost:
        return entry.cost
    if "input_gradient" in entry.needs:
        return "full backward pass"
    return "shared pass" if entry.needs else "no pass"


@list_command.command("metrics")
@click.option("--verbose", "-v", is_flag=True, help="Also bounds, level, needs and citation.")
def list_metrics(verbose: bool) -> None:
    """List the metrics with summary, better direction, and whether a run computes them.

    "in a run": whether `metrics` of a study may name it; the others are functions of hp.metrics (-v lists the
    reason). Families may be named as one: localise, structure, insertion_deletion.

    \b
    Examples:
      heatproof list metrics
      heatproof list metrics -v            bounds, level, what each needs, citation
    """
    if verbose:
        for entry in metrics:
            say(metric_page(entry))
        return
    rows = [(m.name, "no" if not_in_a_run(m) else "yes", better(m), m.summary) for m in metrics]
    show_table("metrics", ("metric", "in a run", "better", "description"), rows)
    console.print("Bounds, level, what each one needs and where it comes from: heatproof list metrics -v")


def metric_page(entry: Metric) -> str:
    """Everything about one metric, one fact per line."""
    facts = {"description": entry.summary, "also called": ", ".join(entry.aliases)}
    facts |= {"in a run": not_in_a_run(entry) or "yes", "better": better(entry), "bounds": bounds(entry)}
    facts |= {"one per": entry.level, "needs": ", ".join(sorted(entry.needs)), "citation": entry.cite}
    facts["in the verdict"] = VERDICT.get((entry.question, entry.votes), "")
    return page(entry.name, facts)


def not_in_a_run(entry: Metric) -> str:
    """Reason why a study cannot name this metric, or ''."""
    try:
        read_metrics([entry.name])
    except InputError as error:
        return f"no: {str(error).partition(', which ')[2] or str(error).partition(': ')[2] or error}"
    return ""


def better(entry: Metric) -> str:
    return {True: "higher", False: "lower", None: "-"}[entry.higher_is_better]


def bounds(entry: Metric) -> str:
    low, high = (f"{bound:.3g}" if math.isfinite(bound) else "" for bound in entry.bounds)
    return f"{low} to {high}" if low and high else f">= {low}" if low else f"<= {high}" if high else "-"


def page(name: str, facts: dict[str, str]) -> str:
    return "\n".join([name, *(f"  {fact + ':':<15} {text}" for fact, text in facts.items() if text), ""])


@list_command.command("layers")
@click.argument("model")
@click.option("--image-size", type=click.IntRange(8), help="Side of the image; the model's own by default.")
def list_layers(model: str, image_size: int | None) -> None:
    """List the layers of MODEL that a CAM can read, in the order of execution, with the size of their grids.

    They are found by one pass over a blank image; weights are not loaded. The default is the last layer after
    its activation; the list gives the reason. "NAME+relu" is the output of NAME after a function.

    \b
    Examples:
      heatproof list layers torchvision:resnet50
      heatproof list layers timm:convnext_tiny --image-size 384
    """
    from heatproof.run.config import check_network

    check_network(model, ())  # before torch is imported, which takes its time
    import torch

    from heatproof.models.capture import capture
    from heatproof.models.layers import picture_layers, why
    from heatproof.models.load import load_model
    from heatproof.models.running import frozen_eval

    loaded = load_model(model)
    size = (image_size,) * len(loaded.preprocess.size) if image_size else loaded.preprocess.size
    blank = torch.zeros(1, loaded.preprocess.channels, *size)
    with frozen_eval(loaded.module):
        default = capture(loaded, blank, needs=frozenset({"activations"})).layer
    table = new_table(
        f"layers of {loaded.name} for {'x'.join(map(str, size))} images",
        ("layer", "grid", "channels", ""),
        right=("grid", "channels"),
    )
    for name, layout, channels in picture_layers(loaded, blank):
        text, note = name, ""
        if default is not None and name == default.partition("+")[0]:
            text, note = default, f"default: {why(loaded, default)}"
        table.add_row(text, "x".join(map(str, layout.grid)), str(channels), note)
    console.print(table)
