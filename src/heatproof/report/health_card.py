"""What a run can fill of CHAI's Applied Model Card, an open card for AI in health (schema v0.2, mc.chai.org).

The schema is one of XML. Here its elements stand under their own names as JSON: one that may occur several
times is a list, and the ValueJson of a result is a text, as the schema has it. What heatproof does not know
stays out (who made the network, for whom, on which people); `left_out` names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from heatproof.metrics.stats import mean_interval
from heatproof.registry import explainers, parse_call
from heatproof.report.definitions import references
from heatproof.verdict.answers import Test, Verdict
from heatproof.verdict.data import RunData

KEYWORDS = ("explainability", "saliency maps", "image classification")
LIMITS = (
    "A map that follows the network shows what the network uses, not that its answer is right.",
    "The answers hold for these pictures, this network and these weights; no groups of people were compared.",
    "Whether maps help people to decide better was not measured.",
)
HOW = (
    "A method follows where the pixels that its maps rank highest matter more to the answer than those of "
    "its maps of untrained networks, and than those of the map turned around. How often that errs was "
    "measured on networks whose evidence was planted."
)
METRIC = {
    "MetricGoal": None, "Results": {"MetricResult": {"Label": None, "ValueJson": None}},
    "Interpretation": None, "TestType": None, "TestingDataDescription": None,
    "ValidationProcessAndJustification": None,
}  # fmt: skip
SCHEMA: Mapping[str, Any] = {  # the elements in their order
    "BasicInfo": dict.fromkeys(("ModelName", "ModelDeveloper", "DeveloperContact")),
    "ReleaseInfo": dict.fromkeys(
        ("ReleaseStage", "ReleaseDate", "ReleaseVersion", "GlobalAvailability", "EHRCompatibility",
         "RegulatoryApproval")
    ),
    "ModelSummary": {"Summary": None, "Keywords": {"Keyword": None}},
    "UsesAndDirections": dict.fromkeys(
        ("IntendedUseAndWorkflow", "PrimaryIntendedUsers", "HowToUse", "TargetedPatientPopulation",
         "CautionedOutOfScopeSettings")
    ),
    "Warnings": dict.fromkeys(
        ("KnownRisksAndLimitations", "KnownBiasesOrEthicalConsiderations", "ClinicalRiskLevel")
    ),
    "TrustIngredients": {
        "AISystemFacts": dict.fromkeys(
            ("OutcomesAndOutputs", "ModelType", "FoundationModels", "InputDataSource",
             "OutputAndInputDataTypes", "DevelopmentDataCharacterization", "BiasMitigationApproaches",
             "OngoingMaintenance", "Security", "Transparency")
        ),
        "TransparencyInformation": dict.fromkeys(
            ("FundingSource", "ThirdPartyInformation", "StakeholdersConsulted")
        ),
    },
    "KeyMetrics": dict.fromkeys(
        ("UsefulnessUsabilityEfficacy", "FairnessEquity", "SafetyReliability"), METRIC
    ),
    "Resources": dict.fromkeys(
        ("EvaluationReferences", "ClinicalTrial", "PeerReviewedPublications", "ReimbursementStatus",
         "PatientConsentOrDisclosure")
    ),
    "Bibliography": None,
}  # fmt: skip


class CardNumber(NamedTuple):
    """A mean over n pictures with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def health_card(data: RunData, verdict: Verdict) -> dict[str, Any]:
    """The elements that a run can fill, in the schema's order."""
    manifest, network = data.manifest, data.checkpoint
    pictures = f"{len(data.images.ids)} pictures: {data_set(data)}, hash {manifest.data or 'unknown'}"
    risks = [*LIMITS, *(f"{note}." for note in verdict.notes)]
    results = list(_map_results(verdict))
    return {
        "BasicInfo": {"ModelName": data.model},
        "ReleaseInfo": {
            "ReleaseVersion": f"{network}, hash of the weights {manifest.models.get(network, 'unknown')}"
        },
        "ModelSummary": {
            "Summary": f"{verdict.headline}. {verdict.sentence}",
            "Keywords": {"Keyword": list(KEYWORDS)},
        },
        "Warnings": {"KnownRisksAndLimitations": " ".join(risks)},
        "TrustIngredients": {
            "AISystemFacts": {
                "OutcomesAndOutputs": f"Classes: {', '.join(data.classes.values()) or 'unnamed'}",
                "Transparency": f"Its saliency maps were tested. {verdict.sentence}",
            }
        },
        "KeyMetrics": {
            **_efficacy(data, pictures),
            "SafetyReliability": {
                "MetricGoal": "Do saliency maps follow the network, and does it look where it should?",
                **({"Results": {"MetricResult": results}} if results else {}),
                "Interpretation": f"{verdict.headline}. {verdict.measured}".strip(),
                "TestType": f"heatproof {manifest.versions.get('heatproof', '')}, run of {manifest.started}",
                "TestingDataDescription": pictures,
                "ValidationProcessAndJustification": HOW,
            },
        },
        "Resources": {"EvaluationReferences": f"heatproof run {manifest.id or manifest.started}"},
        "Bibliography": bibliography(data),
    }


def _efficacy(data: RunData, pictures: str) -> dict[str, Any]:
    found = accuracy(data)
    if found is None:
        return {}
    return {
        "UsefulnessUsabilityEfficacy": {
            "MetricGoal": "Does the network name the class?",
            "Results": {"MetricResult": [_result("share classified rightly", found)]},
            "Interpretation": f"n = {found.n}; pictures of the run, which need not be those it will meet",
            "TestingDataDescription": pictures,
        }
    }


def _map_results(verdict: Verdict) -> Iterator[dict[str, str]]:
    for one in verdict.methods:
        for test in voting(one.tests):
            yield _result(f"{one.method}: {test.title}", estimate(test))
    whole = verdict.network.test
    if whole is not None and math.isfinite(whole.value):
        yield _result(f"network: {whole.title}", estimate(whole))


def _result(label: str, found: CardNumber) -> dict[str, str]:
    numbers: dict[str, Any] = {"kind": "estimate", "estimate": round(found.value, 6)}
    if found.bounded:
        ends = {"lower": round(found.low, 6), "upper": round(found.high, 6), "level": 95}
        numbers |= {"kind": "estimate_ci", **ends}
    return {"Label": label, "ValueJson": json.dumps(numbers, separators=(",", ":"))}


def estimate(test: Test) -> CardNumber:
    return CardNumber(test.value, test.low, test.high, test.n)


def voting(tests: Sequence[Test]) -> list[Test]:
    """Those that an answer rests on."""
    return [test for test in tests if test.votes and math.isfinite(test.value)]


def accuracy(data: RunData) -> CardNumber | None:
    """The share of pictures that are classified rightly; None where no class is known, or several may be."""
    if data.manifest.several:  # those that have a finding alone say nothing about false alarms
        return None
    right = [float(one) for one in data.images.right if one is not None]
    return CardNumber(sum(right) / len(right), *mean_interval(right), len(right)) if right else None


def data_set(data: RunData) -> str:
    """What the pictures are called, without the folders they lie in."""
    setting = data.manifest.config.get("images", {})
    path = str(setting.get("path") or "")
    return path if setting.get("kind") == "hf" else Path(path).name or str(setting.get("kind", "images"))


def bibliography(data: RunData) -> str:
    """BibTeX of the papers behind the run's methods and metrics."""
    keys = {of.entry.cite for of in data.measures if of.entry}
    cited = {entry.name: entry.cite for entry in explainers}
    keys |= {cited[name] for method in data.methods if (name := parse_call(method)[0]) in cited}
    return "\n\n".join(references()[key].bibtex for key in sorted(keys & set(references())))


def left_out(card: Mapping[str, Any], schema: Mapping[str, Any] = SCHEMA, above: str = "") -> list[str]:
    """The schema's elements that a card does not fill, as paths."""
    found: list[str] = []
    for name, inside in schema.items():
        own, path = card.get(name), f"{above}{name}"
        if own is None:
            found.append(path)
        elif inside and not isinstance(own, list):
            found += left_out(own, inside, f"{path}/")
    return found
