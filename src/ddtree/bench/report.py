"""A stored run as one HTML file: tables, and plots as inline SVG, without scripts or links."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree.bench.plan import Cell
from ddtree.bench.results import COLUMNS, Row, Run, summarise
from ddtree.metrics import STAGES

# Okabe and Ito's palette, told apart by colour-blind readers too; grey is the baseline.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
_GREY, _INK = "#8a8f98", "#1c2430"
_STAGE_COLOURS = dict(zip(STAGES[1:], _COLOURS, strict=False)) | {"rest": "#c9ced6"}
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#b6bcc6",
    "axes.labelcolor": _INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ee",
    "text.color": _INK,
    "xtick.color": "#4a5362",
    "ytick.color": "#4a5362",
    "legend.frameon": False,
    # Text as paths looks the same everywhere.
    "svg.fonttype": "path",
    "svg.hashsalt": "ddtree",
}
_PAGE_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: #1c2430;
       max-width: 1080px; margin: 2.5rem auto; padding: 0 1.25rem; background: #fff; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: .95rem; margin: 1.5rem 0 .4rem; color: #4a5362; font-weight: 600; }
.lead { font-size: 1.1rem; color: #313a48; margin: .25rem 0 1.25rem; max-width: 48rem; }
.note { color: #4a5362; max-width: 48rem; }
.refused { color: #a3180b; font-weight: 600; }
.warning { border-left: 4px solid #a3180b; background: #fdf1ef; padding: .6rem 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
        font-size: .88rem; }
th { text-align: right; font-weight: 600; color: #4a5362; border-bottom: 2px solid #d5dae2; }
td { text-align: right; border-bottom: 1px solid #eceff3; }
th, td { padding: .35rem .6rem; }
th:first-child, td:first-child { text-align: left; }
tr.baseline td { color: #6a7280; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; font-size: .88rem; }
dt { color: #4a5362; } dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1.25rem; }
figure { margin: 0; border: 1px solid #e6e9ee; border-radius: 8px; padding: .75rem; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .82rem; color: #4a5362; margin-top: .4rem; }
"""


def html_report(run: Run) -> str:
    """The whole page."""
    summary = summarise(run)
    title = f"Benchmark: {_models(run)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(_headline(run, summary))}</p>',
        _warnings(summary),
        "<h2>Plots</h2>",
        f'<div class="plots">{"".join(_figures(run, summary))}</div>',
        "<h2>Tables</h2>",
        *(f"<h3>{escape(str(cell))}</h3>{_table(rows)}" for cell, rows in summary.items()),
        _reading(run),
        f"<h2>Conditions</h2>{_conditions(run)}",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _models(run: Run) -> str:
    settings = run.header["settings"]
    names = [settings.get("target") or "running servers", settings["prompts"]]
    return ", ".join(names)


def _headline(run: Run, summary: dict[Cell, list[Row]]) -> str:
    cell, rows = next(iter(summary.items()))
    compared = [row for row in rows[1:] if row.speedup is not None]
    where = f"At {cell}"
    if not compared:
        return f"{where}, {run.baseline} gave {rows[0].rate:.1f} tokens/s; nothing is compared."
    best = max(compared, key=lambda row: row.speedup[0] if row.speedup else 0)
    return (
        f"{where}, {best.stored.contender} gave {best.rate:.1f} tokens/s against "
        f"{rows[0].rate:.1f} of {run.baseline}: {best.speedup_text()} times as fast."
    )


def _warnings(summary: dict[Cell, list[Row]]) -> str:
    refused = [
        f"{row.stored.contender} at {cell} ({row.stored.verdict})"
        for cell, rows in summary.items()
        for row in rows
        if row.refused
    ]
    if not refused:
        return ""
    return (
        '<p class="warning"><b>Outputs differ beyond the gate, so these are not compared:</b> '
        f"{escape('; '.join(refused))}</p>"
    )


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("contender", *COLUMNS))
    lines = []
    for row in rows:
        baseline = row is rows[0]
        kind = "baseline" if baseline else "refused" if row.refused else ""
        cells = [row.stored.contender, *row.cells(baseline)]
        lines.append(
            f'<tr class="{kind}">' + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>"
        )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _reading(run: Run) -> str:
    plan = run.header["plan"]
    return (
        '<p class="note">Contenders take turns on the same prompts, in rotating order. tokens/s is '
        "the median over turns; speed-up the median over turns of the ratio to the baseline in the "
        "same turn, with a bootstrap interval over turns. tau counts committed tokens per round, "
        "the target's own included. TTFT and TPOT are the client's view: time to the first token, "
        "and time per token after it. Greedy outputs are compared with the baseline's before "
        f"speeds are (gate {escape(plan['gate'])}, largest regret {plan['epsilon']:g}); sampled "
        "cells inherit the greedy verdict.</p>"
    )


def _conditions(run: Run) -> str:
    header = run.header
    hardware, settings = header["hardware"], header["settings"]
    entries: dict[str, Any] = {
        "measured": header["started"],
        "commit": header["commit"],
        "machine": f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB",
        "GPUs": ", ".join(hardware["gpus"]) or "none",
        "instructions": ", ".join(hardware["instructions"]),
        "load before": hardware["load_at_start"],
        "versions": ", ".join(f"{name} {text}" for name, text in header["versions"].items()),
        **settings,
        **header["plan"],
    }
    shown = {k: v for k, v in entries.items() if v not in (None, "", [])}
    items = "".join(
        f"<dt>{escape(k.replace('_', ' '))}</dt><dd>{escape(_plain(v))}</dd>"
        for k, v in shown.items()
    )
    return f"<dl>{items}</dl>"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _figures(run: Run, summary: dict[Cell, list[Row]]) -> Iterable[str]:
    """Every plot there is data for, as an HTML figure."""
    first = next(iter(summary.values()))
    colours = {row.stored.contender: colour for row, colour in zip(first, _palette(), strict=False)}
    budgets = {one["label"]: one["budget"] for one in run.header["contenders"]}
    condition = str(first[0].stored.cell)
    plots: list[tuple[str, str, Callable[[Axes], None] | None]] = [
        ("speedup", f"Speed-up over {run.baseline}, by contender and budget ({condition}).",
         lambda axes: _speedups(axes, first, colours)),
        ("tau", f"Tokens committed per round ({condition}).",
         (lambda axes: _taus(axes, first, budgets, colours)) if _known_taus(first) else None),
        ("throughput", "Tokens per second of all requests together, by requests in flight.",
         (lambda axes: _throughput(axes, summary, colours)) if _sweeps(summary) else None),
        ("histogram", f"How many tokens a round commits, as a share of rounds ({condition}).",
         (lambda axes: _histogram(axes, first, colours)) if _known_taus(first) else None),
        ("ledger", f"Where a round's time goes ({condition}). The rest is scheduling, sampling "
         "outside the round, and the way to the client; a contender that logs no stages is all "
         "rest.", (lambda axes: _ledger(axes, first)) if _known_rounds(first) else None),
    ]  # fmt: skip
    for name, caption, draw in plots:
        if draw is not None:
            yield _figure(name, caption, draw)


def _palette() -> Sequence[str]:
    return (_GREY, *_COLOURS)


def _figure(name: str, caption: str, draw: Callable[[Axes], None]) -> str:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Identifiers are only unique within one drawing.
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    labelled = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    return f'<figure id="plot-{name}">{labelled}<figcaption>{escape(caption)}</figcaption></figure>'


def _speedups(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    shown = [row for row in rows if row.speedup is not None]
    names = [row.stored.contender for row in shown]
    middles = [row.speedup[0] for row in shown if row.speedup]
    below = [row.speedup[0] - row.speedup[1] for row in shown if row.speedup]
    above = [row.speedup[2] - row.speedup[0] for row in shown if row.speedup]
    bars = axes.bar(
        names, middles, yerr=[below, above], color=[colours[n] for n in names], width=0.6,
        error_kw={"ecolor": _INK, "elinewidth": 1, "capsize": 3},
    )  # fmt: skip
    axes.bar_label(bars, [f"{m:.2f}" for m in middles], padding=2, fontsize=8)
    axes.axhline(1, color=_GREY, linewidth=1, linestyle="--")
    axes.set(title="Speed-up", ylabel="times the baseline")
    axes.margins(y=0.15)
    axes.tick_params(axis="x", rotation=15 if len(names) > 5 else 0)
    axes.grid(visible=False, axis="x")


def _known_taus(rows: Sequence[Row]) -> bool:
    return any(row.stored.tau is not None for row in rows)


def _taus(
    axes: Axes, rows: Sequence[Row], budgets: dict[str, int | None], colours: dict[str, str]
) -> None:
    known = {r.stored.contender: r.stored.tau for r in rows if r.stored.tau is not None}
    trees = sorted((budget, name) for name in known if (budget := budgets.get(name)) is not None)
    if trees:
        axes.plot(
            [b for b, _ in trees], [known[n] for _, n in trees], "-", color=_INK, linewidth=1,
            zorder=1,
        )  # fmt: skip
    for budget, name in trees:
        axes.plot(budget, known[name], "o", color=colours[name], label=name)
        axes.annotate(f"{known[name]:.2f}", (budget, known[name]), xytext=(0, 7),
                      textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
    for name, tau in known.items():
        if budgets.get(name) is None:
            axes.axhline(tau, color=colours[name], linewidth=1.5, linestyle="--",
                         label=f"{name}: {tau:.2f}")  # fmt: skip
    axes.set(title="tau by budget", xlabel="budget, drafted nodes", ylabel="tokens per round")
    axes.set_ylim(bottom=min(1.0, *known.values()))
    axes.margins(y=0.2)
    if trees:
        axes.set_xscale("log", base=2)
        axes.set_xticks([b for b, _ in trees], [str(b) for b, _ in trees])
        axes.minorticks_off()
    else:
        axes.set_xticks([])
    axes.legend(fontsize=8)


def _sweeps(summary: dict[Cell, list[Row]]) -> bool:
    return len({cell.concurrency for cell in summary}) > 1


def _throughput(axes: Axes, summary: dict[Cell, list[Row]], colours: dict[str, str]) -> None:
    first = next(iter(summary))
    sweep = {
        cell.concurrency: rows
        for cell, rows in summary.items()
        if (cell.temperature, cell.thinking) == (first.temperature, first.thinking)
    }
    for place, name in enumerate(colours):
        points = [(c, rows[place].rate) for c, rows in sorted(sweep.items())]
        axes.plot(*zip(*points, strict=True), "o-", color=colours[name], label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sweep), [str(c) for c in sorted(sweep)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(title="Throughput", xlabel="requests in flight", ylabel="tokens/s")
    axes.legend(fontsize=8)


def _histogram(axes: Axes, rows: Sequence[Row], colours: dict[str, str]) -> None:
    known = [(r.stored.contender, r.stored.histogram) for r in rows if r.stored.histogram]
    # Plain decoding commits one token a round; its bar would only flatten the others.
    shown = [(name, counts) for name, counts in known if len(counts) > 1] or known
    width = 0.8 / len(shown)
    deepest = max(max(counts) for _, counts in shown)
    for place, (name, counts) in enumerate(shown):
        total = sum(counts.values())
        places = [n + (place - (len(shown) - 1) / 2) * width for n in range(1, deepest + 1)]
        shares = [counts.get(n, 0) / total for n in range(1, deepest + 1)]
        axes.bar(places, shares, width, color=colours[name], label=name)
    axes.set_xticks(range(1, deepest + 1))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set(title="Accept lengths", xlabel="tokens committed", ylabel="share of rounds")
    axes.grid(visible=False, axis="x")
    axes.legend(fontsize=8)


def round_milliseconds(row: Row) -> float | None:
    """Mean time of a round as the client sees it: median TPOT times tau."""
    one = row.stored
    if not row.token_ms:
        return None
    tau = one.tau
    if tau is None:
        return None
    return row.token_ms[0] * tau


def _known_rounds(rows: Sequence[Row]) -> bool:
    return any(round_milliseconds(row) is not None for row in rows)


def _ledger(axes: Axes, rows: Sequence[Row]) -> None:
    known = [(row, whole) for row in rows if (whole := round_milliseconds(row)) is not None]
    names = [row.stored.contender for row, _ in known]
    reached = [0.0] * len(known)
    for stage, colour in _STAGE_COLOURS.items():
        if stage == "rest":
            lengths = [max(w - r, 0.0) for (_, w), r in zip(known, reached, strict=True)]
        else:
            lengths = [row.stored.ledger.get(stage, 0.0) for row, _ in known]
        if any(lengths):
            axes.barh(names, lengths, left=reached, color=colour, label=stage, height=0.6)
        reached = [r + length for r, length in zip(reached, lengths, strict=True)]
    for place, total in enumerate(reached):
        axes.annotate(f"{total:.1f}", (total, place), xytext=(4, 0), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(title="Ledger of a round", xlabel="milliseconds")
    axes.grid(visible=False, axis="y")
    axes.legend(fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.17),
                columnspacing=0.9, handlelength=1)  # fmt: skip
