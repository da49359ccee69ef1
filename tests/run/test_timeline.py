"""Spans: kept while somebody records, with their stage, from every thread; nothing at all otherwise."""

from __future__ import annotations

import threading

import pytest

from heatproof.timeline import FRAME, NOTHING, recording, span


def test_without_recording_spans_share_an_empty_context() -> None:
    with recording():
        pass
    assert span("forward", inputs=3) is NOTHING and span("decode") is NOTHING
    with span("a"), span("b"):  # which may be entered inside itself
        pass


def test_a_span_has_its_stage_and_inputs() -> None:
    with recording() as recorded, span(FRAME, "u1"), span("metric", "insertion"), span("forward", inputs=7):
        pass
    inner, metric, unit = recorded.spans
    assert (inner.name, inner.inputs, inner.stage) == ("forward", 7, ("metric", "insertion"))
    assert metric.stage == ("metric", "insertion") and unit.stage == (FRAME, "u1")
    assert unit.start <= metric.start <= inner.start <= inner.end <= metric.end <= unit.end <= recorded.ended


def test_threads_have_stages_of_their_own() -> None:
    def decode() -> None:
        with span("decode"):
            pass

    with recording() as recorded, span("metric", "a"):
        thread = threading.Thread(target=decode, name="decoder")
        thread.start()
        thread.join()
    decoded, metric = recorded.spans
    assert decoded.stage == ("decode", "") and decoded.thread != metric.thread == recorded.main
    assert recorded.names[decoded.thread] == "decoder"


def test_an_error_ends_the_span_and_the_recording() -> None:
    with pytest.raises(RuntimeError), recording() as recorded, span("metric", "a"):
        raise RuntimeError
    assert [span_.name for span_ in recorded.spans] == ["metric"] and recorded.ended > 0
    assert span("x") is NOTHING
