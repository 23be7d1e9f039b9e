"""One round's tree as a self-contained SVG: depth to the right, the best child straight on."""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from rich.cells import cell_len

from ddtree.cli.show import Node, Picture, probability, shorten

_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_ADVANCE = 7.83  # width of a character at 13 px in these fonts, which are 0.602 em wide
_SMALL = 6.63  # at 11 px
_ROW, _BOX, _GAP, _MARGIN, _TOP = 32, 24, 46, 28, 122
_INK, _GREY, _LINE, _PAPER = "#1f2937", "#6b7280", "#cbd5e1", "#ffffff"
_GREEN, _GREEN_FILL, _AMBER, _AMBER_FILL = "#15803d", "#dcfce7", "#b45309", "#fef3c7"
_BONUS = -2


@dataclass
class _Box:
    """Where a node goes: left edge, middle line, width."""

    x: float
    y: float
    width: float

    @property
    def right(self) -> float:
        return self.x + self.width


def svg(picture: Picture) -> str:
    """The drawing as XML text."""
    boxes = _place(picture)
    width = max(760.0, max(box.right for box in boxes.values()) + _MARGIN)
    bottom = max(box.y for box in boxes.values()) + _ROW
    height = bottom + 80
    root = Element(
        "svg", xmlns="http://www.w3.org/2000/svg", width=f"{width:.0f}", height=f"{height:.0f}",
        viewBox=f"0 0 {width:.0f} {height:.0f}", role="img",
    )  # fmt: skip
    root.set("font-family", _FONT)
    root.set("font-size", "13")
    SubElement(root, "title").text = f"Draft tree of round {picture.number}"
    SubElement(root, "rect", width="100%", height="100%", fill=_PAPER, rx="8")
    _head(root, picture, int((width - 2 * _MARGIN) / _ADVANCE))
    _columns(root, picture, boxes, bottom)
    for node in picture.nodes[1:]:
        _edge(root, boxes[node.parent], boxes[node.index], node)
    if picture.bonus is not None:
        _edge(root, boxes[picture.last_accepted.index], boxes[_BONUS], None)
    for node in picture.nodes:
        _node(root, node, boxes[node.index])
    if picture.bonus is not None:
        _bonus(root, picture.bonus, boxes[_BONUS])
    _legend(root, picture, bottom + 14)
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _place(picture: Picture) -> dict[int, _Box]:
    """A row for every leaf; a parent on the row of its first child; a column for every depth."""
    rows: dict[int, int] = {}
    next_row = 0

    def walk(node: Node) -> None:
        nonlocal next_row
        rows[node.index] = next_row
        children = picture.children(node)
        for child in children:
            walk(child)
        if picture.bonus is not None and node is picture.last_accepted:
            rows[_BONUS] = next_row
            next_row += 1
        elif not children:
            next_row += 1

    walk(picture.nodes[0])
    depths = {node.index: node.depth for node in picture.nodes}
    widths = {node.index: _width(node.label, node.depth > 0) for node in picture.nodes}
    if picture.bonus is not None:
        depths[_BONUS] = picture.last_accepted.depth + 1
        widths[_BONUS] = _width(picture.bonus, False)
    boxes, x = {}, float(_MARGIN)
    for depth in range(max(depths.values()) + 1):
        column = [index for index in depths if depths[index] == depth]
        for index in column:
            boxes[index] = _Box(x, _TOP + 30 + rows[index] * _ROW, widths[index])
        x += max((widths[index] for index in column), default=0) + _GAP
    return boxes


def _width(label: str, with_probability: bool) -> float:
    return 20 + cell_len(label) * _ADVANCE + (44 if with_probability else 0)


def _head(root: Element, picture: Picture, room: int) -> None:
    accepted = picture.last_accepted.depth
    drafted = picture.summary.nodes
    title = f"Round {picture.number}: {drafted} drafted nodes, {accepted} accepted, "
    tokens = "1 token" if picture.committed == 1 else f"{picture.committed} tokens"
    title += f"{tokens} committed by one target forward"
    _text(root, _MARGIN, 36, title, size=15, weight="bold")
    lines = (("prompt", picture.prompt, False), ("so far", picture.before, True))
    for row, (name, text, keep_end) in enumerate(lines):
        y = 62 + 20 * row
        _text(root, _MARGIN, y, name, fill=_GREY)
        _text(root, _MARGIN + 62, y, shorten(text, room - 8, keep_end))
    if picture.untrained:
        _text(root, _MARGIN, 102, "untrained drafter: its guesses are random", fill=_AMBER)


def _columns(root: Element, picture: Picture, boxes: dict[int, _Box], bottom: float) -> None:
    """Each depth's heading: how many nodes, and the drafter's probability of being in the tree."""
    summary = picture.summary
    for depth, (count, mass) in enumerate(
        zip(summary.nodes_by_depth, summary.mass_by_depth, strict=True), start=1
    ):
        x = min(boxes[node.index].x for node in picture.nodes if node.depth == depth)
        line = {"x1": f"{x - 12:.1f}", "x2": f"{x - 12:.1f}", "y1": "114", "y2": f"{bottom:.0f}"}
        SubElement(root, "line", line, stroke="#f1f5f9")
        _text(root, x, _TOP, f"depth {depth}", size=11, fill=_GREY)
        shown = f"{count} node{'s' * (count > 1)}, {probability(mass)}"
        _text(root, x, _TOP + 13, shown, size=9, fill=_GREY)


def _edge(root: Element, start: _Box, end: _Box, node: Node | None) -> None:
    bend = (end.x - start.right) / 2
    path = f"M{start.right:.1f} {start.y:.1f}C{start.right + bend:.1f} {start.y:.1f} "
    path += f"{end.x - bend:.1f} {end.y:.1f} {end.x:.1f} {end.y:.1f}"
    edge = SubElement(root, "path", d=path, fill="none")
    if node is None:
        edge.set("stroke", _AMBER)
        edge.set("stroke-dasharray", "4 3")
        return
    edge.set("stroke", _GREEN if node.accepted else _LINE)
    edge.set("stroke-width", f"{1 + 5 * node.path_probability:.2f}")


def _node(root: Element, node: Node, box: _Box) -> None:
    group = SubElement(root, "g", {"class": "node accepted" if node.accepted else "node"})
    group.set("data-node", str(node.index))
    SubElement(group, "title").text = (
        f"node {node.index}, depth {node.depth}, token {node.token}: "
        f"probability {node.probability:.4g}, path {node.path_probability:.4g}"
    )
    root_node = node.depth == 0
    fill, line, ink = _PAPER, _LINE, _INK
    if root_node:
        fill, line, ink = _INK, _INK, _PAPER
    elif node.accepted:
        fill, line, ink = _GREEN_FILL, _GREEN, _GREEN
    _rectangle(group, box, fill, line)
    weight = "bold" if node.accepted else "normal"
    _text(group, box.x + 10, box.y + 4.5, node.label, fill=ink, weight=weight)
    if not root_node:
        shown = probability(node.probability)
        _text(group, box.right - 9 - len(shown) * _SMALL, box.y + 4.5, shown, size=11,
              fill=_GREEN if node.accepted else _GREY)  # fmt: skip


def _bonus(root: Element, label: str, box: _Box) -> None:
    group = SubElement(root, "g", {"class": "bonus"})
    SubElement(group, "title").text = "chosen by the target after the accepted path: the next root"
    _rectangle(group, box, _AMBER_FILL, _AMBER).set("stroke-dasharray", "4 3")
    _text(group, box.x + 10, box.y + 4.5, label, fill=_AMBER, weight="bold")


def _legend(root: Element, picture: Picture, y: float) -> None:
    x = float(_MARGIN)
    entries = (
        (_INK, _INK, "root"),
        (_GREEN_FILL, _GREEN, "accepted"),
        (_PAPER, _LINE, "drafted, not chosen"),
        (_AMBER_FILL, _AMBER, "the target's own next token"),
    )
    for fill, line, name in entries:
        _rectangle(root, _Box(x, y, 14), fill, line, height=14)
        _text(root, x + 20, y + 4, name, size=11, fill=_GREY)
        x += 20 + len(name) * _SMALL + 24
    lines = (
        "number: the drafter's probability of the token; thickness: of the whole path",
        "under a depth: its nodes and the drafter's probability that one of them is right; "
        f"expected length {picture.summary.expected_length:.2f}",
    )
    for row, line in enumerate(lines):
        _text(root, _MARGIN, y + 26 + 17 * row, line, size=11, fill=_GREY)


def _rectangle(parent: Element, box: _Box, fill: str, line: str, height: int = _BOX) -> Element:
    place = {"x": f"{box.x:.1f}", "y": f"{box.y - height / 2:.1f}"}
    size = {"width": f"{box.width:.1f}", "height": str(height), "rx": str(height // 4)}
    return SubElement(parent, "rect", place | size, fill=fill, stroke=line)


def _text(
    parent: Element, x: float, y: float, text: str, *, size: int = 13, fill: str = _INK,
    weight: str = "normal",
) -> None:  # fmt: skip
    element = SubElement(parent, "text", x=f"{x:.1f}", y=f"{y:.1f}", fill=fill)
    element.set("font-size", str(size))
    element.set("font-weight", weight)
    element.set("xml:space", "preserve")
    # Control characters cannot stand in XML; tokens never hold any (see `token_label`).
    element.text = "".join(c if c.isprintable() else "\u2423" for c in text)
