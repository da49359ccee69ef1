"""The live page's server: what it answers, to whom, and what it never gives away."""

from __future__ import annotations

import csv
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from click.testing import CliRunner

from heatproof.cli import main
from heatproof.errors import InputError, StoreError
from heatproof.metrics.results import mean_interval
from heatproof.report.gallery import packed_maps
from heatproof.report.live import PER_PAGE, Live, SharedCache, key_of
from heatproof.report.serve import Server
from heatproof.store import Manifest, RunFolder
from heatproof.types import Score, Unit
from heatproof.verdict.data import read_run
from made_run import CLASSES, EVIL, METHODS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("serve") / "run", images=90)


@contextmanager
def serving(run: Path, **settings: Any) -> Iterator[Server]:
    with Server(run, **settings) as server:
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def server(run: RunFolder) -> Iterator[Server]:
    with serving(run.path) as server:
        yield server


def ask(
    server: Server, path: str, headers: Mapping[str, str] | None = None, verb: str = "GET", **query: Any
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """The path goes out exactly as it is written."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(verb, f"{path}?{urlencode(query)}" if query else path, headers=dict(headers or {}))
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, reply.headers, content


def answer(server: Server, path: str, **query: Any) -> Any:
    status, _, content = ask(server, path, **query)
    assert status == 200, content
    return json.loads(content)


# --- what it says -------------------------------------------------------------------------------------------


def test_state_counts_what_is_there(server: Server, run: RunFolder) -> None:
    state = answer(server, "/state")
    rows = run.scores().sql("select count(*) as n from scores")[0]["n"]
    assert (state["units"], state["rows"]) == (2, rows) and state["idle"] >= 0


def test_choices_are_those_of_the_run(server: Server) -> None:
    choices = answer(server, "/choices")
    assert [method["name"] for method in choices["methods"]] == list(METHODS)
    assert choices["checkpoints"] == ["epoch01", "epoch02"] and choices["checkpoint"] == "epoch02"
    assert [each["name"] for each in choices["classes"]] == list(CLASSES)
    assert {metric["name"] for metric in choices["metrics"]} == {"insertion", "deletion", "degenerate"}


def every(server: Server, **query: Any) -> list[dict[str, Any]]:
    pages = answer(server, "/images", **query)["pages"]
    return [
        image for p in range(1, pages + 1) for image in answer(server, "/images", page=p, **query)["images"]
    ]


def test_images_come_in_pages_and_none_twice(server: Server, run: RunFolder) -> None:
    first = answer(server, "/images")
    assert (first["total"], first["of"], first["pages"], len(first["images"])) == (90, 90, 2, PER_PAGE)
    assert [image["id"] for image in every(server)] == read_run(run).images.ids
    assert answer(server, "/images", page=99)["page"] == 2


def test_filters_agree_with_the_rows(server: Server, run: RunFolder) -> None:
    data = read_run(run)
    wrong = {i for i, right in zip(data.images.ids, data.images.right, strict=True) if not right}
    assert {image["id"] for image in every(server, answer="wrong")} == wrong
    assert {image["id"] for image in every(server, answer="right")} == set(data.images.ids) - wrong
    dogs = {i for i, label in zip(data.images.ids, data.images.labels, strict=True) if label == 1}
    assert {image["id"] for image in every(server, **{"class": 1})} == dogs
    both = every(server, **{"class": 1, "answer": "wrong"})
    assert {image["id"] for image in both} == dogs & wrong and both
    assert {image["id"] for image in every(server, search="WINDOW.HACKED")} == {EVIL[k] for k in (0, 1, 2, 5)}
    assert answer(server, "/images", search="no such name")["total"] == 0


@pytest.mark.parametrize(("metric", "order"), [("insertion", "up"), ("deletion", "down")])
def test_sorting_follows_the_chosen_method(server: Server, run: RunFolder, metric: str, order: str) -> None:
    data, method = read_run(run), "layercam"
    column = data.images.scores[metric, method]
    expected = sorted(range(90), key=lambda i: column[i] if order == "up" else -column[i])
    got = every(server, method=method, sort=metric, order=order)
    assert [image["id"] for image in got] == [data.images.ids[i] for i in expected]
    assert got[0]["scores"][metric][1] == pytest.approx(column[expected[0]], abs=1e-6)


def test_what_is_not_defined_comes_last_either_way(tmp_path: Path) -> None:
    run = RunFolder.resume(tmp_path / "run", Manifest.collect({"methods": ["gradcam"]}))
    values = [float("nan"), 0.3, 0.9, float("nan"), 0.1]
    rows = [
        Score(
            "net", "last", f"{i}.png", 0, 0, "gradcam", "insertion", value, "constant map" * (value != value)
        )
        for i, value in enumerate(values)
    ]
    run.write_unit(Unit("last", (0, 5), ("gradcam",), ("insertion",)), rows)
    with serving(run.path) as server:
        for order, expected in (("up", "4 1 2 0 3"), ("down", "2 1 4 0 3")):
            got = every(server, sort="insertion", order=order)
            assert [image["id"] for image in got] == [f"{i}.png" for i in expected.split()]
            assert [image["scores"]["insertion"][0] for image in got][3:] == [None, None]


def test_means_are_over_what_is_shown(server: Server, run: RunFolder) -> None:
    data = read_run(run)
    column, right = data.images.scores["insertion", "gradcam"], np.array(data.images.right)
    means = answer(server, "/images", method="gradcam", answer="wrong")["means"]["insertion"]
    assert means == pytest.approx([column[~right].mean(), column.mean()], abs=1e-5)


def test_maps_and_pictures_are_those_of_the_store(server: Server, run: RunFolder) -> None:
    data = read_run(run)
    ids = data.images.ids[:4]
    got = answer(server, "/maps", method="layercam", keys=",".join(map(key_of, ids)))
    assert got == {key_of(name): each for name, each in packed_maps(data, "layercam", ids).items()}
    early = answer(server, "/maps", method="layercam", checkpoint="epoch01", keys=key_of(ids[0]))
    assert early[key_of(ids[0])]["data"] == got[key_of(ids[0])]["data"]  # the same drawing at both
    status, headers, content = ask(server, f"/picture/{key_of(ids[0])}")
    assert (
        status == 200 and content == run.pictures().read(ids[0]) and headers["Content-Type"] == "image/jpeg"
    )


def test_the_other_checkpoint_goes_beside(server: Server, run: RunFolder) -> None:
    early = read_run(run, checkpoint="epoch01")
    image = answer(server, "/images", beside="epoch01")["images"][3]
    place = early.images.ids.index(image["id"])
    assert image["beside"]["insertion"][0] == pytest.approx(
        early.images.scores["insertion", "gradcam"][place]
    )
    alone = answer(server, "/image", key=image["key"], checkpoint="epoch01")
    assert alone["scores"] == image["beside"] and "beside" not in answer(server, "/images")["images"][3]


def test_csv_holds_all_that_is_chosen(server: Server, run: RunFolder) -> None:
    status, headers, content = ask(server, "/rows.csv", sort="insertion", order="down", answer="right")
    rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"))))
    images = every(server, sort="insertion", order="down", answer="right")
    assert status == 200 and "attachment" in headers["Content-Disposition"] and len(rows) == 72
    assert [row["image"] for row in rows] == [image["id"] for image in images]
    assert float(rows[0]["insertion"]) == pytest.approx(images[0]["scores"]["insertion"][0], abs=1e-6)
    assert {row["class"] for row in rows} == set(CLASSES) and {row["method"] for row in rows} == {"gradcam"}


def test_csv_never_becomes_a_formula(tmp_path: Path) -> None:
    run = RunFolder.resume(
        tmp_path / "run", Manifest.collect({"methods": ["gradcam"]}, classes=["=cmd|x", "b"])
    )
    row = Score("net", "last", "@SUM(A1)", 0, 0, "gradcam", "insertion", -0.5)
    run.write_unit(Unit("last", (0, 1), ("gradcam",), ("insertion",)), [row])
    with serving(run.path) as server:
        (line,) = csv.DictReader(io.StringIO(ask(server, "/rows.csv")[2].decode("utf-8-sig")))
    assert (line["image"], line["class"], line["insertion"]) == ("'@SUM(A1)", "'=cmd|x", "-0.5")


def test_the_report_is_the_report(server: Server) -> None:
    report = answer(server, "/report")
    assert 'class="scores"' in report["sections"] and 'class="chart"' in report["sections"]
    text = "".join(report.values())
    assert "<script" not in text and "onerror=" not in text and '<b>"bold"' not in text
    assert "cat &lt;b&gt;" in text and "net &lt;1&gt;" in text
    assert answer(server, "/report", checkpoint="epoch01")["head"] != report["head"]


# --- growing ------------------------------------------------------------------------------------------------


def test_a_run_without_rows_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heatproof.report.live.PATIENCE", (0.0, 0.0))
    run = RunFolder.resume(tmp_path / "run", Manifest.collect({"methods": ["gradcam"]}))
    with serving(run.path) as server:
        assert (waiting := answer(server, "/state"))["units"] == 0
        status, _, content = ask(server, "/images")
        assert status == 503 and b"waiting for the first unit" in content and ask(server, "/")[0] == 200
        for k in range(2):
            row = Score("net", "last", f"{k}.png", 0, 0, "gradcam", "insertion", 0.5)
            run.write_unit(Unit("last", (k, k + 1), ("gradcam",), ("insertion",)), [row])
            state = answer(server, "/state")
            assert (state["units"], answer(server, "/images")["of"]) == (k + 1, k + 1)
            assert state["version"] != waiting["version"]


def test_a_snapshot_does_not_change_while_it_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", images=10, maps=False)
    live = Live(run.path)
    before = live.snapshot()
    rows = before.scores().sql("select count(*) as n from scores")
    row = Score("net <1>", "epoch09", "new.png", 0, 0, "gradcam", "insertion", 0.5)
    run.write_unit(Unit("epoch09", (0, 1), ("gradcam",), ("insertion",)), [row])
    run.plan(run.ledger.seals(), 10, ("epoch01", "epoch02", "epoch09"))
    assert before.scores().sql("select count(*) as n from scores") == rows
    assert live.snapshot() is before, "a new look must wait until reading is paid for"
    assert "epoch09" not in read_run(before).checkpoints and "epoch09" in read_run(run).checkpoints


def test_many_who_ask_at_once_make_it_once() -> None:
    cache, made, got = SharedCache(2), [], []

    def make() -> int:
        time.sleep(0.05)
        made.append(1)
        return 7

    threads = [threading.Thread(target=lambda: got.append(cache.get("key", make))) for _ in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert got == [7] * 8 and len(made) == 1
    with pytest.raises(ZeroDivisionError):
        cache.get("broken", lambda: 1 // 0)
    assert cache.get("broken", lambda: 1) == 1, "a failure is not kept"


def test_intervals_are_those_of_plain_resampling() -> None:
    """mean_interval looks up many resamples at once; drawn one by one they are the same, bit for bit."""
    for n, seed in ((1, 0), (7, 3), (100, 0), (601, 1)):
        values, rng = np.random.default_rng(n).normal(size=n), np.random.default_rng(seed)
        means = [values[rng.integers(0, n, n)].mean() for _ in range(1000)]
        low, high = np.quantile(means, [(1 - 0.95) / 2, (1 + 0.95) / 2])
        assert mean_interval(values, seed=seed) == (low, high)


# --- who may ask, and for what ------------------------------------------------------------------------------

OUTSIDE = (
    "/../run.json", "/..%2frun.json", "/%2e%2e/run.json", "/assets/../serve.py", "/assets/..%2f..%2fserve.py",
    "/assets/%2e%2e/serve.py", "/picture/../../run.json", "/picture/..%2f..%2frun.json", "/run.json",
    "//etc/passwd", "/....//run.json", "/..%5crun.json", "/..%252frun.json", "/%c0%ae%c0%ae/run.json",
    "/scores/", "/assets/", "/picture/" + "0" * 24, "/picture/" + "A" * 24, "http://127.0.0.1/../run.json",
    "../run.json", "/picture/%00",
)  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_address_leaves_the_run(server: Server, path: str) -> None:
    status, _, content = ask(server, path)
    assert status == 404 and b"config" not in content and b"root:" not in content


@pytest.mark.parametrize("key", ["checkpoint", "model", "method", "sort"])
def test_unknown_names_are_404(server: Server, key: str) -> None:
    for name in ("../../../etc/passwd", "nobody", "epoch02/../epoch01"):
        status, _, content = ask(server, "/images", **{key: name})  # type: ignore[arg-type]
        assert status in (400, 404) and "error" in json.loads(content)
    assert ask(server, "/maps", method="../gradcam", keys=key_of(EVIL[0]))[0] == 404
    assert ask(server, "/maps", method="gradcam", keys="../../run.json")[0] == 404


@pytest.mark.parametrize(
    "query", [{"page": "x"}, {"class": "1e5"}, {"answer": "maybe"}, {"order": "sideways"}]
)
def test_senseless_choices_are_400(server: Server, query: dict[str, Any]) -> None:
    assert ask(server, "/images", **query)[0] == 400
    assert ask(server, "/maps", method="gradcam", keys="a," * 500)[0] == 400


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "FOO"])
def test_nothing_can_be_written(server: Server, verb: str) -> None:
    status, headers, _ = ask(server, "/state", verb=verb)
    assert status == 405 and headers["Allow"] == "GET, HEAD"


def test_head_is_get_without_its_content(server: Server) -> None:
    for path in ("/", "/images", "/assets/page.css"):
        status, headers, content = ask(server, path, verb="HEAD")
        assert (
            status == 200 and content == b"" and int(headers["Content-Length"]) == len(ask(server, path)[2])
        )


def test_every_answer_carries_its_policy(server: Server) -> None:
    for path in ("/", "/state", "/assets/live.js", "/nothing", f"/picture/{key_of(EVIL[0])}"):
        _, headers, _ = ask(server, path)
        script = next(p for p in headers["Content-Security-Policy"].split("; ") if p.startswith("script-src"))
        assert script == "script-src 'self'" and headers["X-Content-Type-Options"] == "nosniff"
        assert ("no-store" in headers["Cache-Control"]) != path.startswith("/picture")


def test_other_names_for_this_machine_are_refused(server: Server) -> None:
    """A page elsewhere may point its own name here (DNS rebinding); its name is then in Host."""
    for host, status in (
        ("evil.example", 403), (f"evil.example:{server.server_port}", 403), ("127.0.0.1.evil.example", 403),
        ("", 403), ("localhost", 200), (f"127.0.0.1:{server.server_port}", 200), ("[::1]:8080", 200),
    ):  # fmt: skip
        assert ask(server, "/state", {"Host": host})[0] == status, host


def test_elsewhere_needs_the_token(run: RunFolder) -> None:
    with serving(run.path, host="0.0.0.0") as server:
        assert server.token and len(server.token) >= 32 and server.token in server.address
        for path in ("/", "/state", "/images", f"/picture/{key_of(EVIL[0])}", "/assets/page.js", "/nothing"):
            assert ask(server, path)[0] == 401
            assert ask(server, path, token="wrong")[0] == 401
            assert ask(server, path, {"Cookie": f"heatproof_{server.server_port}=wrong"})[0] == 401
        assert ask(server, "/state", token="wrong é")[0] == 401
        status, headers, _ = ask(server, "/", token=server.token)
        assert (status, headers["Location"]) == (303, "/") and "HttpOnly" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert ask(server, "/state", {"Cookie": f"theme=dark; {cookie}"})[0] == 200
        assert ask(server, "/rows.csv", token=server.token)[0] == 200
    with serving(run.path, host="0.0.0.0") as another:
        assert another.token != server.token
    with serving(run.path, token=True) as local:
        assert ask(local, "/state")[0] == 401 and ask(local, "/state", token=local.token)[0] == 200


def test_loopback_is_the_default(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1" and server.token is None
    assert CliRunner().invoke(main, ["serve", "--help"]).output.count("127.0.0.1") == 1


# --- those who do not behave --------------------------------------------------------------------------------


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


@pytest.mark.parametrize("target", ["http://[::1/", "http://[v1.x/state", "/state?" + "a&" * 50])
def test_an_address_that_cannot_be_read_is_400(
    server: Server, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with connected(server) as line:
        line.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in capsys.readouterr().err


def test_a_request_has_a_time_for_all_of_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends a byte now and then is never silent for long, and never ends."""
    monkeypatch.setattr("heatproof.report.serve.PATIENCE", 0.6, raising=False)
    with serving(run.path) as server, connected(server) as line:
        began = time.monotonic()
        line.sendall(b"GET /state HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 60:
                line.sendall(b"X-Slow: 1\r\n")
                time.sleep(0.1)
        assert time.monotonic() - began > 0.4
        for _ in range(2):  # each request of a connection has its own time
            assert ask(server, "/state")[0] == 200


def test_requests_on_one_connection_have_a_time_each(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heatproof.report.serve.PATIENCE", 1.0, raising=False)
    with serving(run.path) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        for _ in range(4):
            connection.request("GET", "/assets/page.css")
            line = connection.sock
            assert connection.getresponse().read() and connection.sock is line
            time.sleep(0.5)
        connection.close()


def test_connections_are_bounded(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heatproof.report.serve.CONNECTIONS", 4, raising=False)
    with serving(run.path) as server:
        before, lines = threading.active_count(), [connected(server) for _ in range(4)]
        while threading.active_count() < before + 4:
            time.sleep(0.01)
        with connected(server) as more:
            assert more.recv(100).startswith(b"HTTP/1.1 503 ")
        assert threading.active_count() == before + 4
        [line.close() for line in lines]
        while threading.active_count() > before:
            time.sleep(0.01)
        assert ask(server, "/state")[0] == 200


# --- what it says when it cannot start ----------------------------------------------------------------------


def test_a_taken_port_names_a_free_one(server: Server, run: RunFolder) -> None:
    with pytest.raises(InputError, match=r"port \d+ is free: --port \d+") as caught:
        Server(run.path, port=server.server_port)
    free = int(str(caught.value).rpartition(" ")[2])
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", free))


def test_no_run_and_no_host_raise_a_clear_error(tmp_path: Path, run: RunFolder) -> None:
    with pytest.raises(StoreError, match="is not a run folder"):
        Server(tmp_path)
    with pytest.raises(InputError, match="cannot resolve the host"):
        Server(run.path, host="no such host.invalid")
