"""The sentences with numbers of docs/results/calibration.md, made from its CSV files and rates.json."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

from heatproof.verdict.answers import CUES, MISSED, rate_text
from heatproof.verdict.follow import ENOUGH, calibration

HERE = Path(__file__).parent / "results"
sys.path.insert(0, str(HERE.parents[1]))

from research.calibration.sequential import AUDIT  # noqa: E402
from research.calibration.thresholds import (  # noqa: E402
    CHOSE,
    MOST_FALSE_ALARMS,
    OTHER,
    SINCE,
    Rates,
    rates_of,
    read_judged,
)
from research.evidence.plan import PUBLISH  # noqa: E402

NETWORK = ("data", "network", "token", "strength", "seed", "network_of_pair")
KINDS = ("false_alarm", "miss", "undecided")
UNUSED, UNSEEN = "all not used to choose", "other half, not seen before"
GROUP_NAMES = {CHOSE: "used to choose the rule"}  # on the page, if not as in judged.csv
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with (HERE / "calibration" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def sentences() -> dict[str, str]:
    return {
        "summary": summary(),
        "aims": aims(),
        "candidates": candidates(),
        "why": why(),
        "kinds": kinds(),
        "sequential-said": sequential(),
        "sizes-said": sizes(),
        "uses-said": uses(),
        "discs-said": discs(),
    }


def summary() -> str:
    known = calibration()
    pairs = {name: rates["networks"] // 2 for name, rates in known["rates_by_group"].items()}
    total, small = known["population"]["pairs"], {row["pair"] for row in rows("looked_at.csv")}
    return (
        f"**{total} pairs of networks ({2 * total} networks); the aim was 30 pairs.** The three numbers of "
        "the rule, and whether a map is compared with the largest or the mean of its maps under random "
        f"weights, were chosen on {pairs[CHOSE]} of them (*{GROUP_NAMES[CHOSE]}*): every other one by name "
        f"of the first {pairs[CHOSE] + pairs[OTHER]}. The {pairs[OTHER]} pairs of the *{OTHER}* and the "
        f"{pairs[SINCE]} *{SINCE}*, with other seeds, were not used to choose any of these, and the rule was "
        "not changed after they were measured. The form of the rule (two kinds of control maps, log-odds, "
        "the baseline, no answer if no map exceeds its control maps) was chosen before, on earlier pairs of "
        f"the same kinds; and {len(small)} of the first pairs had been looked at when the mean became a "
        f"candidate. Without these, the other half is the row *{UNSEEN}*."
    )


def rates_by_method() -> dict[str, Rates]:
    """Rates on all pairs that were not used to choose the rule."""
    judged = read_judged(HERE / "calibration" / "judged.csv")
    clean = [row for name, own in judged.items() if name != CHOSE for row in own if not row["control"]]
    methods = dict.fromkeys(row["method"] for row in clean)
    return {method: rates_of([row for row in clean if row["method"] == method]) for method in methods}


def kinds() -> str:
    """False alarms of class activation maps and of input gradients."""
    cams, gradients = calibration()["rates"]["false_alarm_by_kind"].values()
    alarms = {method: rates.false_alarm for method, rates in rates_by_method().items()}
    above = ", ".join(method for method, share in alarms.items() if share.share > MOST_FALSE_ALARMS)
    plain = alarms["gradient"].high >= gradients["share"]
    return (
        f"False alarms differ by the kind of method: {rate_text(cams)} of the class activation maps that "
        f"follow, and {rate_text(gradients)} of the input gradients that follow (gradient, smoothgrad, "
        "integrated-gradients), are judged not to follow, on all pairs that were not used to choose the "
        f"rule. Above the aim of 5 % are {above}. The cause is not known: smoothgrad and "
        "integrated-gradients had only eight samples or steps, but the rate of gradient, which has none, is "
        f"{'no lower' if plain else 'lower'}. For an answer about one of these methods on your own network, "
        "run the contrast test."
    )


def sequential() -> str:
    """Results in the table of the sequential test."""
    case = {(r["pairs"].partition(" (")[0], r["looks"], r["steps"], r["random networks"]): r
            for r in rows("sequential.csv")}  # fmt: skip

    def share(row: Row, name: str) -> float:
        return float(row[name].partition("%")[0])

    one, audit = case["all", "one look", "10", "3"], case["all", AUDIT, "10", "2"]
    large, coarse = case["larger networks", AUDIT, "10", "2"], case["all", AUDIT, "5", "3"]
    met = {
        "at most 5 % false alarms": share(audit, "false alarm") <= 5,
        "10 % misses": share(audit, "miss") <= 10,
        "80 inputs": int(audit["inputs"]) <= 80,
    }
    reached, missed = (", ".join(aim for aim in met if met[aim] == wanted) for wanted in (True, False))
    beside_aim = "above" if share(large, "false alarm") > 5 else "within"
    return (
        f"In the form of an audit (ten steps, two random networks) the rates are {audit['false alarm']} "
        f"false alarms, {audit['miss']} misses and {audit['undecided']} undecided, with {audit['inputs']} "
        "inputs; with one look after 100 images and three random networks they are "
        f"{one['false alarm']}, {one['miss']} and {one['undecided']}, with {one['inputs']}. Aims reached: "
        f"{reached or 'none'}; not reached: {missed or 'none'}. On the larger networks alone the rate of "
        f"false alarms is {large['false alarm']}, {beside_aim} the aim, and that of input gradients "
        f"{large['of input gradients']}. Half as many steps, with three random networks, need "
        f"{coarse['inputs']} inputs and have {coarse['false alarm']} false alarms."
    )


def sizes() -> str:
    """Misses in runs of one method, and of nine."""
    miss = {(row["methods"], row["looks"]): row["miss"] for row in rows("sizes.csv")}
    once, sequentially = "tested once", "tested sequentially"
    return (
        f"A run of one method has {miss['1', sequentially]} misses if {sequentially}, {miss['1', once]} if "
        f"{once}, instead of {miss['9', sequentially]} and {miss['9', once]}, and no false alarms: the "
        "method itself sets the scale, so it is judged not to follow only if random weights do not change "
        "its maps."
    )


def candidates() -> str:
    shares = {
        name: " %, ".join(f"{100 * of['rates'][kind]['share']:.1f}" for kind in KINDS)
        for name, of in calibration()["candidates"].items()
    }
    return (
        "For each image, a map is compared with the mean of its three maps under random weights. Before, it "
        "was compared with the largest of them; then one network with random weights whose map happens to "
        "lie on the evidence is enough for a false alarm. On the half used to choose the rule, false alarms, "
        f"misses and undecided were {shares['largest']} % with the best rule for the largest and "
        f"{shares['mean']} % with the best rule for the mean, which was chosen. A rule was acceptable with "
        "at most 5 % false alarms and at most 10 % misses of every kind of control map. With all kinds "
        "pooled, a rule that often judges maps of networks with random weights to follow would have been "
        "acceptable, because noise, edges and the centre are never missed. The chosen rule on the first "
        "pairs, with each summary:"
    )


def aims() -> str:
    rates = calibration()["rates"]
    met = {
        "false alarms of at most 5 %": rates["false_alarm"]["share"] <= 0.05,
        "upper limit of false alarms of at most 12 %": rates["false_alarm"]["high"] <= 0.12,
        "misses of at most 10 %": rates["miss"]["share"] <= 0.10,
        "at most 25 % undecided at 100 images": rates["undecided"]["share"] <= 0.25,
    }
    reached, missed = ("; ".join(aim for aim in met if met[aim] == wanted) for wanted in (True, False))
    return (
        f"Aims reached on all pairs that were not used to choose the rule: {reached or 'none'}. "
        f"Not reached: {missed or 'none'}."
    )


def why() -> str:
    networks: dict[tuple[str, ...], list[Row]] = {}
    for row in rows("judged.csv"):
        if row["group"] == OTHER and row["control"] == "False":
            networks.setdefault(tuple(row[key] for key in NETWORK), []).append(row)
    few = sum(max(int(row["n"]) for row in own) < ENOUGH for own in networks.values())
    silent = sum({row["answer"] for row in own} == {"undecided"} for own in networks.values())
    return (
        f"For {silent} of the {len(networks)} networks of the *{OTHER}*, all methods are undecided. On "
        f"{few} of them fewer than {ENOUGH} of 100 images can be used: no baseline removes the class, as "
        "happens if the network answers one of two classes for all other inputs. Then no order of pixels "
        "can be evaluated, and the verdict states this instead of an answer."
    )


def uses() -> str:
    """Results for the second answer, from rates.json and uses.csv."""
    known, table = calibration()["network"], rows("uses.csv")
    effects, rates = known["effects"], known["rates"]
    recurs = {
        truth: [row["recurs_without_regions"] == "True" for row in table if row["truth"] == truth]
        for truth in ("cheats", "clean")
    }
    form = known["form"]
    tiny = [row for row in table if row["half"] == PUBLISH and "-tiny-" in row["network"]]
    larger = [row for row in table if row["half"] == PUBLISH and row not in tiny]
    return (
        f"{known['pairs']} pairs were measured on one H200; the form of the rule and its limits were chosen "
        f"on one half, and the table counts the {rates['networks']} networks of the other {rates['pairs']} "
        f"pairs. Chosen among 18 forms: maps of {form['method']}, windows of "
        f"{' and '.join(f'{side:.2f}' for side in form['sides'])} of the side, statistics transferred to the "
        f"{form['statistics']}. A shortcut is stated for an effect of at least {effects['transplant']:g} "
        f"(transplant) or {effects['property']:g} (property). The larger networks alone, which had not been "
        f"looked at before: {_counts(larger)}. The tiny ones: {_counts(tiny)}. Without annotations every "
        f"answer is undecided; evidence recurs in {sum(recurs['cheats'])} of {len(recurs['cheats'])} "
        f"networks that use the cue and in {sum(recurs['clean'])} of {len(recurs['clean'])} that ignore it. "
        f"{_missed(rates)} {_measured_later(table)}"
    )


def _measured_later(table: list[Row]) -> str:
    """Results for the pairs of ResNet-50, and of a choice that includes them."""
    later = [row for row in table if "-resnet50-" in row["network"]]
    again = [row for row in rows("uses_chosen_again.csv") if row["half"] == PUBLISH]
    return (
        f"The pairs of ResNet-50 were measured after the rule was fixed, so all {len(later)} of their "
        f"networks are independent of the choice: {_counts(later)}. The rule was not changed. If it were "
        "chosen again, with the pairs of ResNet-50 that are in the half used to choose, it would have "
        f"another form and other limits, and the results on the other half would be {_counts(again)} "
        "([uses_chosen_again.csv](calibration/uses_chosen_again.csv)): the choice depends on few networks, "
        "and the rates have the uncertainty of their intervals."
    )


def _counts(table: list[Row]) -> str:
    def count(answer: str, truth: str) -> str:
        own = [row["answer"] for row in table if truth in ("", row["truth"])]
        return f"{own.count(answer)} of {len(own)}"

    return (
        f"{count('yes', 'cheats')} that use the cue judged to use the object, {count('no', 'clean')} that "
        f"ignore it judged to use something else, {count('no', 'cheats')} shortcuts stated, "
        f"{count('undecided', '')} undecided"
    )


def _missed(rates: dict[str, Any]) -> str:
    names = [
        name for kind, name in CUES.items()
        if rates[kind]["stated"]["n"] and 1 - rates[kind]["stated"]["share"] > MISSED
    ]  # fmt: skip
    if not names:
        return "Every kind is stated in at least 80 % of the networks that use it."
    return f"Missed in more than {MISSED:.0%} of the networks that use it: {', '.join(names)}."


def discs() -> str:
    table = rows("controls.csv")
    networks = sum(row["method"] == "gradcam" for row in table)
    yes = dict.fromkeys((row["method"] for row in table), 0)
    for row in table:
        yes[row["method"]] += row["answer"] == "yes"
    never = ", ".join(method for method, n in yes.items() if not n)
    some = ", ".join(f"{method} {n}" for method, n in yes.items() if n and method != "gradcam")
    gradcam = [row["answer"] for row in table if row["method"] == "gradcam"]
    return (
        f"On these {networks} networks, with Grad-CAM as the only method of the run, the verdict for "
        f"Grad-CAM is follows on {gradcam.count('yes')}, does not follow on {gradcam.count('no')} and "
        f"undecided on {gradcam.count('undecided')}. Control maps never judged to follow: {never}. Judged to "
        f"follow, by number of networks: {some}."
    )
