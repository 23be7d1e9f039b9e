"""The report as a person sees it: opened in a headless Chromium, plots and all."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import matplotlib.image
import numpy as np

from ddtree.bench.plan import cells
from ddtree.bench.report import html_report

from .test_results import four, stored_run

PLOTS = ("speedup", "tau", "throughput", "histogram", "ledger")
WIDTH, HEIGHT = 1200, 3000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = stored_run(folder / "run.jsonl", four(), cells([1, 2, 4], [0.0, 1.0], [None]))
    file = folder / "report.html"
    file.write_text(html_report(run), encoding="utf-8")
    return file


def chromium(tmp_path: Path, page: Path, *arguments: str) -> str:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
               "--no-first-run", "--disable-background-networking", "--disable-component-update",
               "--disable-sync", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}",
               f"--window-size={WIDTH},{HEIGHT}", *arguments, page.as_uri()]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path
    ).stdout


# Marks every plot's rectangle on the page, and how many of its shapes have an area or a length.
PROBE = """<script>addEventListener("load", () => {
  const found = [...document.querySelectorAll("figure")].map(f => {
    const box = f.querySelector("svg").getBoundingClientRect();
    const drawn = [...f.querySelectorAll("path, use")].filter(p => {
      const b = p.getBoundingClientRect(); return b.width + b.height > 0; }).length;
    return [f.id, box.x, box.y, box.width, box.height, drawn].join(" "); });
  document.body.dataset.plots = found.join(";"); });</script></body>"""


def test_every_plot_renders(page, tmp_path):
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    dom = chromium(tmp_path, probed, "--dump-dom")
    found = re.search(r'data-plots="([^"]*)"', dom)
    assert found is not None
    boxes = {}
    for line in found[1].split(";"):
        name, *numbers = line.split()
        *box, drawn = map(float, numbers)
        assert drawn > 40, f"{name} draws {drawn} shapes"
        boxes[name] = box
    assert list(boxes) == [f"plot-{name}" for name in PLOTS]

    shot = tmp_path / "shot.png"
    chromium(tmp_path, page, f"--screenshot={shot}")
    pixels = matplotlib.image.imread(shot)[:, :, :3]
    for name, (x, y, width, height) in boxes.items():
        part = pixels[int(y) : int(y + height), int(x) : int(x + width)]
        assert part.shape[0] > 200, f"{name} is cut off or too small"
        ink = (part < 0.97).any(axis=2)
        assert 0.01 < ink.mean() < 0.9, f"{name} is blank or a blot"
        # Bars, lines and dots are coloured; axes and letters are not.
        coloured = np.ptp(part, axis=2) > 0.3
        assert coloured.sum() > 300, f"{name} shows no data"


class Structure(HTMLParser):
    """Tags, identifiers and references of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action"):
                self.links.append(value)

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_stands_alone(page):
    found = Structure()
    found.feed(page.read_text(encoding="utf-8"))
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert all(link.startswith("#") for link in found.links)
    assert len(found.ids) == len(set(found.ids)), "two plots share an identifier"
    assert {link[1:] for link in found.links} <= set(found.ids)


def test_the_page_says_what_was_measured_and_how(page):
    found = Structure()
    found.feed(page.read_text(encoding="utf-8"))
    text = " ".join(found.text)
    wanted = (
        *("SmolLM2-135M-Instruct", "gsm8k.jsonl", "Example <CPU>"),
        *("ddtree:8 gave 90.0 tokens/s", "1.80 (1.80\u20131.80) times as fast", "1.80 (1 turn)"),
        *("concurrency 4, greedy", "concurrency 2, temperature 1"),
        *("8 of 8 equal", "greedy: 8 of 8 equal"),
    )
    for part in wanted:
        assert part in text, part


def test_refused_outputs_are_announced_and_not_plotted(tmp_path):
    backends = four(script=lambda prompt, cell: [0] * 8)
    run = stored_run(tmp_path / "run.jsonl", backends, cells([1], [0.0], [None]))
    text = html_report(run)
    assert "not compared:</b> ddtree:32 at concurrency 1, greedy (REFUSED: 0 of 8 equal)" in text
    assert "ddtree:32 gave" not in text
    assert "plot-throughput" not in text, "one concurrency is no sweep"
