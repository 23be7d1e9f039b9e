"""One round's tree as a person reads it: in the terminal here, as SVG in `ddtree.cli.svg`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import exp
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from ddtree.cli.errors import CommandError
from ddtree.cli.text import TextStream, token_label

if TYPE_CHECKING:
    from ddtree.cli.run import Run
    from ddtree.engine import Round
    from ddtree.metrics import TreeSummary


@dataclass(frozen=True)
class Node:
    """One node of a picture.

    Attributes:
        index, parent, depth, token: as in `DraftTree`; the root's parent is -1.
        label: the token, visibly.
        probability: the drafter's, of this token at its depth.
        path_probability: the product from the root down to it.
        accepted: the target chose this path.
    """

    index: int
    parent: int
    depth: int
    token: int
    label: str
    probability: float
    path_probability: float
    accepted: bool


@dataclass(frozen=True)
class Picture:
    """One round, ready to be drawn.

    Attributes:
        nodes: root first, in the tree's order: a parent before its children, the more probable
            sibling first.
        bonus: label of the target's own token after the accepted path, the next root; None where
            the generation ended before it.
        number: of the round, from 1.
        prompt, before: what was asked and what is committed already, the root included.
        untrained: the drafter was not trained.
    """

    nodes: tuple[Node, ...]
    bonus: str | None
    summary: TreeSummary
    number: int
    prompt: str
    before: str
    untrained: bool

    @property
    def last_accepted(self) -> Node:
        return max((n for n in self.nodes if n.accepted), key=lambda n: n.depth)

    @property
    def committed(self) -> int:
        """Tokens this round committed."""
        return self.last_accepted.depth + (self.bonus is not None)

    def children(self, parent: Node) -> list[Node]:
        return [n for n in self.nodes if n.parent == parent.index]

    def record(self) -> dict[str, Any]:
        """The round for a machine."""
        return {
            "round": self.number,
            "prompt": self.prompt,
            "before": self.before,
            "nodes": [asdict(node) for node in self.nodes],
            "bonus": self.bonus,
            "committed": self.committed,
            "summary": asdict(self.summary),
        }


def take_picture(run: Run, number: int, prompt: str) -> Picture:
    """Decode up to a round and picture its tree.

    Args:
        number: of the round, from 1.
    Raises:
        CommandError: the answer ends before that round.
    """
    if number < 1:
        raise CommandError(f"round is {number}; the first is 1")
    text = TextStream(run.pair.tokenizer)
    before = ""
    for index, step in enumerate(run.rounds()):
        if index == number:
            return _picture(run, step, number, prompt, before)
        before += text.push(step.tokens)
    raise CommandError(
        f"the answer ends after {len(run.accept_lengths)} rounds, so there is no round {number}; "
        f"ask for an earlier --round"
    )


def _picture(run: Run, step: Round, number: int, prompt: str, before: str) -> Picture:
    from ddtree.metrics import debug_summary

    tree = step.tree
    assert tree is not None
    tokenizer = run.pair.tokenizer
    parents, scores = tree.parents[0].tolist(), tree.scores[0].tolist()
    path = step.path[: len(step.tokens) + 1]  # nodes whose tokens were committed, and the root
    nodes = tuple(
        Node(
            index=i,
            parent=parents[i],
            depth=int(tree.depths[0, i]),
            token=int(tree.tokens[0, i]),
            label=token_label(tokenizer, int(tree.tokens[0, i])),
            probability=exp(scores[i] - scores[parents[i]]) if i else 1.0,
            path_probability=exp(scores[i]),
            accepted=i in path,
        )
        for i in range(tree.width)
        if bool(tree.valid[0, i])
    )
    bonus = step.tokens[len(step.path) - 1 :]
    return Picture(
        nodes=nodes,
        bonus=token_label(tokenizer, bonus[0]) if bonus else None,
        summary=debug_summary(tree),
        number=number,
        prompt=prompt,
        before=before,
        untrained=not run.pair.trained,
    )


def draw(picture: Picture) -> Group:
    """The tree for a terminal, accepted path in green, with the debug summary below."""
    root = picture.nodes[0]
    top = Tree(_label(root), guide_style="dim")
    branches = {root.index: top}
    for node in picture.nodes[1:]:
        branches[node.index] = branches[node.parent].add(_label(node))
    if picture.bonus is not None:
        bonus = Text.assemble((picture.bonus, "bold yellow"), ("  the target's own", "yellow"))
        branches[picture.last_accepted.index].add(bonus)
    return Group(_title(picture), top, _footer(picture))


def _title(picture: Picture) -> Text:
    asked = shorten(picture.prompt, 70, keep_end=False)
    return Text.assemble(
        ("prompt  ", "dim"), asked, "\n", ("so far  ", "dim"), shorten(picture.before, 70), "\n"
    )


def _label(node: Node) -> Text:
    style = "bold green" if node.accepted else "default"
    if node.parent < 0:
        return Text.assemble((node.label, style), ("  root", "dim"))
    return Text.assemble(
        (node.label, style),
        (f"  {probability(node.probability)}", "green" if node.accepted else "cyan"),
        (f"  path {probability(node.path_probability)}", "dim"),
        ("  ✓" if node.accepted else "", "green"),
    )


def _footer(picture: Picture) -> Text:
    accepted = picture.last_accepted.depth
    return Text.assemble(
        f"\nround {picture.number}: {accepted} of {picture.summary.nodes} drafted nodes accepted, "
        f"{picture.committed} tokens committed\n",
        (str(picture.summary), "dim"),
    )


def probability(value: float) -> str:
    """Two significant places where they matter: ``.83``, ``.004``, ``2e-07``."""
    if value >= 0.995:
        return "1.0"
    if value >= 0.01:
        return f"{value:.2f}"[1:]
    return f"{value:.3f}"[1:] if value >= 0.001 else f"{value:.0e}"


def shorten(text: str, width: int, keep_end: bool = True) -> str:
    """One line of at most `width` characters; its end is kept, or its beginning."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    return "…" + text[1 - width :] if keep_end else text[: width - 1] + "…"
