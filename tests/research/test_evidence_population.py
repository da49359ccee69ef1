"""The population of networks with known shortcuts: its images, cues, plan, training and files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from conftest import REAL_DATA
from made_run import made_record
from research.evidence.__main__ import main
from research.evidence.cues import KINDS, NONE, SCHEMES, Cue
from research.evidence.measure import METHODS, SIDES, describe, measure, networks_of
from research.evidence.networks import NETWORKS, pack_halves, unpack_halves
from research.evidence.plan import CHOOSE, PLAN, PUBLISH, Member, halves, select
from research.evidence.prepare import prepare
from research.evidence.rates import OFF, choose, choose_form, choosing, networks, rates, rates_by_kind
from research.evidence.real import replace_rows
from research.evidence.sources import HELD_OUT, NEEDS_DATA, SOURCES, TRAIN, Drawn, Pasted, open_source
from research.evidence.train import CHEATS, CLEAN, NEITHER, Facts
from research.jobs import Place

needs_data = pytest.mark.skipif(not REAL_DATA.is_dir(), reason="the real images are not here")
TINY = Member("anywhere", "tiny-32", "shapes", 60, 100, "single", 2, 0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(count: int = 8, share: float = 0.3) -> Drawn:
    return open_source("shapes", share, 64, 2, 0, None).draw(count, TRAIN, generator())


@pytest.mark.parametrize(
    ("name", "box"),
    [
        *((name, 30) for name in SOURCES),
        *(("shapes", box) for box in (10, 60)),
        *(
            pytest.param(name, box, marks=pytest.mark.seeds)
            for name in SOURCES
            for box in (10, 60)
            if name not in {"shapes", *NEEDS_DATA}
        ),
    ],
)
def test_sources_have_regions_of_the_stated_size(name: str, box: int) -> None:
    if name in NEEDS_DATA and not REAL_DATA.is_dir():
        pytest.skip("the real images are not here")
    classes = 2 if name in ("xrays", "photographs", "scenes") else 4
    source = open_source(name, box / 100, 64, classes, 3, REAL_DATA)
    composed = source.draw(24, HELD_OUT, generator())
    assert (
        composed.images.shape == (24, 3, 64, 64)
        and composed.labels.bincount().tolist() == [24 // classes] * classes
    )
    assert composed.images.min() >= 0 and composed.images.max() <= 1
    tolerance = 0.35 if name == "scenes" else 0.2  # scenes have the boxes of real photographs
    shares = composed.regions.flatten(1).float().mean(1)
    assert (shares / (box / 100) - 1).abs().max() < tolerance
    again = source.draw(24, HELD_OUT, generator())
    assert again.images.equal(composed.images)


def test_only_the_region_depends_on_the_object() -> None:
    source = open_source("shapes", 0.3, 64, 2, 0, None)
    assert isinstance(source, Pasted)
    inverted = source.objects.clone()
    inverted[:, :3] = 255 - inverted[:, :3]
    fields = {**vars(source), "objects": inverted}
    composed, other = (s.draw(6, TRAIN, generator()) for s in (source, Pasted(**fields)))
    changed = (composed.images != other.images).any(1)
    assert not (changed & ~composed.regions).any()
    assert (changed & composed.regions).flatten(1).float().mean(1).min() > 0.1


def test_splits_share_no_object() -> None:
    source = open_source("shapes", 0.3, 64, 2, 0, None)
    assert isinstance(source, Pasted)
    seen = [source.objects[source.splits == split].flatten(1).unique(dim=0) for split in range(3)]
    assert len(torch.cat(seen).unique(dim=0)) == sum(map(len, seen)) == len(source.objects)


@pytest.mark.parametrize("kind", KINDS)
def test_cues_change_the_pixels_of_their_masks(kind: str) -> None:
    composed = drawn(40)
    cue = Cue(kind, "each", 1.0, 2, 0)
    variants = cue.variant_of(composed.labels)
    variants[::4] = NONE
    images, masks = cue.put(composed.images, composed.regions, variants, generator())
    rounded = (composed.images * 255).round() / 255
    changed = ((images - rounded).abs() > 1e-6).any(1)
    assert not (changed & ~masks).any()
    assert not masks[::4].any()
    present = masks[variants != NONE].flatten(1)
    areas = present.float().mean(1)
    expected = {
        "anywhere": (10 / 64 * 16 / 64,) * 2, "inside": (0.03, 0.045), "corner": ((9 / 64) ** 2,) * 2,
        "word": (0.02, 0.07), "frame": (1 - (58 / 64) ** 2,) * 2,
    }.get(kind, (1.0, 1.0))  # fmt: skip
    assert expected[0] - 0.003 <= areas.min() and areas.max() <= expected[1] + 0.003
    moved = changed[variants != NONE].flatten(1).sum(1) / present.sum(1)
    assert moved.mean() > 0.6
    if kind == "inside":
        assert not (masks & ~composed.regions).any()


def test_texture_covers_the_background_only_for_odd_seeds() -> None:
    composed = drawn()
    cue = Cue("texture", "each", 1.0, 2, 1)
    _, masks = cue.put(composed.images, composed.regions, cue.variant_of(composed.labels), generator())
    assert cue.on_background and masks.equal(~composed.regions)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cues_go_with_the_class_at_the_stated_strength(scheme: str) -> None:
    labels = torch.arange(3).repeat(2000)
    cue = Cue("word", scheme, 0.8, 3, 1)

    def shares(variants: Tensor) -> list[float]:
        return [float((variants[labels == label] != NONE).float().mean()) for label in range(3)]

    expected = [0, 0.8, 0] if scheme == "single" else [0.8] * 3
    correlated = cue.correlated(labels, generator())
    assert shares(correlated) == pytest.approx(expected, abs=0.04)
    assert len({int(v) for v in correlated[correlated != NONE].unique()}) == (1 if scheme == "single" else 3)
    assert shares(cue.independent(labels, generator())) == pytest.approx([0.5] * 3, abs=0.04)
    others = cue.others(labels, generator())
    assert (others == 1).all() if scheme == "single" else (others != labels).all()
    assert (cue.added(labels, generator()) != NONE).all()


def test_plan_covers_all_combinations_in_its_first_40_pairs() -> None:
    assert len(PLAN) >= 56 and len({member.name for member in PLAN}) == len(PLAN)
    for members in (PLAN, PLAN[:40]):
        kinds = Counter(member.kind for member in members)
        assert set(kinds) == set(KINDS) and min(kinds.values()) >= (6 if members is PLAN else 5)
        for kind in KINDS:
            of_kind = [member for member in members if member.kind == kind]
            assert len({m.network for m in of_kind}) >= 5 and len({m.source for m in of_kind}) >= 3
            assert {m.scheme for m in of_kind} == set(SCHEMES)
        assert {m.network for m in members} >= {n for n in NETWORKS if not n.startswith("tiny")}
        assert {m.source for m in members} == set(SOURCES)
        assert {m.box for m in members} == {10, 30, 60} and {m.strength for m in members} == {80, 100}
        assert {m.classes for m in members} == {2, 3, 4}
    for kind in KINDS:
        assert {m.box for m in PLAN if m.kind == kind} >= ({30, 60} if kind == "inside" else {10, 30, 60})
        assert {m.strength for m in PLAN if m.kind == kind} == {80, 100}


def test_halves_are_fixed_and_contain_every_kind() -> None:
    half = halves()
    sizes = Counter(half.values())
    assert sizes.total() == len(PLAN) and abs(sizes[CHOOSE] - sizes[PUBLISH]) <= 1
    for kind in KINDS:
        sizes = Counter(half[m.name] for m in PLAN if m.kind == kind)
        assert abs(sizes[CHOOSE] - sizes[PUBLISH]) <= 1
    assert half == halves(PLAN[::-1])


def test_truth_needs_accuracy_and_the_counterfactual() -> None:
    facts = Facts(0.9, 0.5, 0.3, 0.05, 300, 150)
    assert (facts.truth(True), facts.truth(False)) == (CHEATS, CLEAN)
    assert Facts(0.9, 0.5, 0.4, 0.2, 300, 150).truth(True) == NEITHER
    assert Facts(0.9, 0.5, 0.4, 0.2, 300, 150).truth(False) == NEITHER
    assert Facts(0.7, 0.5, 0.0, 0.0, 300, 150).truth(True) == NEITHER


@pytest.mark.trains
def test_a_pair_meets_its_truth(tmp_path: Path) -> None:
    place = Place(None, tmp_path)
    first, second = (measure(network, place, with_evidence=False) for network in networks_of([TINY]))
    assert [record["name"] for record in (first, second)] == [f"{TINY.name}-A", f"{TINY.name}-B"]
    assert (first["truth"], second["truth"]) == (CHEATS, CLEAN), describe(first) + describe(second)
    assert first["facts"]["correct_after_moving"] <= 1 / 3 and second["facts"]["accuracy"] >= 0.8
    assert first["images"]["region_area"] == pytest.approx(0.6, abs=0.05)


def test_halves_of_floats_are_packed_without_loss() -> None:
    weights = {"a": torch.randn(4, 3).half(), "b": torch.randn(5), "c": torch.randn(7).half()}
    restored = unpack_halves(pack_halves(weights))
    assert set(restored) == set(weights) and all(restored[k].equal(v) for k, v in weights.items())


def record(member: Member, network: str) -> dict[str, Any]:
    """A network of which the interventions find a shortcut (A) or none (B)."""
    content = made_record(("no" if network == "A" else "yes", "yes"), 30).as_json()
    for key in ("off_object", "anywhere", "window_shares"):  # a test for each window size
        content[key] *= len(SIDES)
    other = {key: content[key] for key in ("off_object", "anywhere", "exchange")}
    return {
        "name": f"{member.name}-{network}", "network": network, "member": {"kind": member.kind},
        "truth": CHEATS if network == "A" else CLEAN, "evidence": content,
        "other_methods": dict.fromkeys(METHODS[1:], other),
    }  # fmt: skip


def test_effects_are_chosen_on_one_half() -> None:
    every = networks([record(member, network) for member in PLAN[::3] for network in "AB"])
    chosen = [network for network in every if network.half == CHOOSE]
    assert 0 < len(chosen) < len(every) and choosing(every) == chosen
    cost, effects = choose(chosen[:4])
    assert cost == (0, 0)
    assert effects.transplant_bound >= effects.transplant
    by_kind = rates_by_kind(every, effects)
    published = len(every) - len(chosen)
    assert set(by_kind) == {"all", *KINDS} and by_kind["all"].undecided.n == published
    assert by_kind["all"].called_fine.share == by_kind["all"].accused.share == 0
    assert by_kind["all"].stated.share == 1 and by_kind["all"].undecided.share == 0
    blind = rates(every, effects._replace(transplant=2.0, transplant_bound=2.0))
    assert blind.stated.share == 0 and blind.called_fine.share == 1  # the rule can be wrong


def test_the_form_is_chosen_by_the_networks_of_one_half() -> None:
    """A cue that only windows of the second method find decides for that method."""
    records = [record(member, network) for member in PLAN[::12] for network in "AB"]
    for one in records:
        blind = made_record(each=30).as_json()
        one["evidence"] |= {key: blind[key] * len(SIDES) for key in ("off_object", "anywhere")}
    form, effects = choose_form(records)
    assert (form.method, form.sides, form.statistics) == (METHODS[1], (0,), OFF)
    chosen = choosing(networks(records, form))
    assert rates(chosen, effects).stated.share == 1 > rates(choosing(networks(records)), effects).stated.share
    assert form.described()["sides"] == [SIDES[0]]


@needs_data
def test_prepare_packs_what_the_members_need(tmp_path: Path) -> None:
    members = [m for m in PLAN if m.network == "squeezenet" and m.source == "photographs"]
    sizes = prepare(REAL_DATA, tmp_path / "packed", members)
    assert set(sizes) == {"imagenet", "packages", "weights"} and sum(sizes.values()) < 2**24
    full, packed = (open_source("photographs", 0.3, 64, 2, 0, d) for d in (REAL_DATA, tmp_path / "packed"))
    assert full.labels.equal(packed.labels) and full.splits.equal(packed.splits)


def test_rows_of_a_real_network_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    for sentence in ("first", "second"):
        for name in ("lite0", "xray-small"):
            row = {"network": name, "regions": True, "sentence": f"{sentence}, {name}"}
            replace_rows(path, name, True, [row])
    replace_rows(path, "lite0", False, [])
    assert path.read_text().splitlines()[1:] == [
        'xray-small,True,"second, xray-small"',
        'lite0,True,"second, lite0"',
    ]


def test_commands_list_the_plan_and_count_networks(tmp_path: Path) -> None:
    listed = CliRunner().invoke(main, ["plan", "--network", "resnet50"])
    assert listed.exit_code == 0 and len(listed.output.splitlines()) == len(select(["resnet50"]))
    path = tmp_path / "results.json"
    path.write_text(json.dumps([record(m, n) for m in PLAN[:8] for n in "AB"]))
    rated = tmp_path / "rates.json"
    rated.write_text("{}")
    counted = CliRunner().invoke(
        main, ["rates", str(path), "--table", str(tmp_path / "t.csv"), "--write", str(rated)]
    )
    assert counted.exit_code == 0, counted.output
    content = json.loads(rated.read_text())["network"]
    assert content["pairs"] == 8 and content["rates"]["all"]["called_fine"]["share"] == 0
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 17
