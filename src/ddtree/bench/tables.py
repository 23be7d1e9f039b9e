"""Tables and numbers in Markdown, filled from stored results.

A document says what it wants and where:

    <!-- stored: bench server_gsm8k.jsonl -->
    ... replaced ...
    <!-- /stored -->

Words after the file select within it. A file that is not there is said to be missing, so that a
figure never outlives its run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ddtree.bench.plan import BenchError
from ddtree.bench.results import COLUMNS, Run, read_run, summarise

# A category of fewer prompts says nothing.
_FEWEST_PROMPTS = 5
_MARKED = re.compile(r"(<!-- stored: ([^>]+?) -->)(.*?)(<!-- /stored -->)", re.DOTALL)


def regenerate(text: str, results: Path) -> str:
    """The document with everything between its markers made anew.

    Raises:
        BenchError: a marker asks for something unknown.
    """

    def fill(found: re.Match[str]) -> str:
        opening, request, _, closing = found.groups()
        filled = render(request.split(), results)
        return f"{opening}\n{filled}\n{closing}" if "\n" in filled else opening + filled + closing

    return _MARKED.sub(fill, text)


def render(words: Sequence[str], results: Path) -> str:
    """What one marker stands for.

    Args:
        words: the kind, the file, and what to select.
        results: folder of the stored results.
    """
    if len(words) < 2 or words[0] not in KINDS:
        raise BenchError(
            f"the marker {' '.join(words)!r} is not KIND FILE ...; kinds are {', '.join(KINDS)}"
        )
    kind, name, *selected = words
    if not (results / name).is_file():
        return f"*no stored run: {name}*"
    return KINDS[kind](results / name, *selected)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and the others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _bench(file: Path) -> str:
    run = read_run(file)
    parts = [_conditions(run)]
    for cell, rows in summarise(run).items():
        body = [[row.stored.contender, *row.cells(row is rows[0])] for row in rows]
        parts.append(f"**{str(cell).capitalize()}**\n\n" + markdown_table(("", *COLUMNS), body))
    return "\n\n".join(parts)


def _conditions(run: Run) -> str:
    header = run.header
    hardware, settings, plan = header["hardware"], header["settings"], header["plan"]
    machine = ", ".join([hardware["cpu"], f"{hardware['cores']} cores", *hardware["gpus"]])
    amx = " with AMX" if "amx_bf16" in hardware["instructions"] else ""
    versions = header["versions"]
    server = f", SGLang {versions['sglang']}" if settings["engine"] == "sglang" else ""
    length = f"{plan['max_new_tokens']} tokens" + ("" if plan["ignore_eos"] else " at most")
    return (
        f"{settings['count']} prompts of `{settings['prompts']}`, {length}, "
        f"{settings['dtype']}, {settings['target'] or 'running servers'}; {machine}{amx}; "
        f"torch {versions['torch']}{server}; commit {header['commit']}, {header['started'][:10]}."
    )


def _speedup(file: Path, contender: str, concurrency: str = "1") -> str:
    """A greedy speed-up as a number."""
    for cell, rows in summarise(read_run(file)).items():
        if cell.greedy and cell.concurrency == int(concurrency):
            for row in rows:
                if row.stored.contender == contender:
                    return f"{row.speedup[0]:.2f}" if row.speedup else "not compared"
    raise BenchError(f"{file.name} has no greedy {contender} at concurrency {concurrency}")


def _drafter_tau(file: Path, record: str, category: str, method: str) -> str:
    """One tau of a drafter's evaluation; `record` counts its lines from 1."""
    for one in _records(file)[int(record) - 1]["tau"]:
        if (one["category"], one["method"]) == (category, method):
            return f"{one['tau']:.2f}"
    raise BenchError(f"{file.name} has no {category} {method} in record {record}")


def _drafter_eval(file: Path) -> str:
    parts = []
    for record in _records(file):
        methods = list(dict.fromkeys(one["method"] for one in record["tau"]))
        head = ["", "prompts", *("chain" if m == "chain" else f"tree {m}" for m in methods)]
        rows = []
        for category in dict.fromkeys(one["category"] for one in record["tau"]):
            found = {o["method"]: o for o in record["tau"] if o["category"] == category}
            if found[methods[0]]["documents"] < _FEWEST_PROMPTS:
                continue
            shown = [_interval(found[m]) for m in methods]
            rows.append([category, str(found[methods[0]]["documents"]), *shown])
        caption = f"{record['prompts']}, {record['max_new_tokens']} tokens, {record['dtype']}"
        parts.append(f"{caption}:\n\n{markdown_table(head, rows)}")
    return "\n\n".join(parts)


def _interval(one: dict[str, Any]) -> str:
    return f"{one['tau']:.2f} ({one['low']:.2f}\u2013{one['high']:.2f})"


def _tree_build(file: Path) -> str:
    head = (
        *("batch, vocabulary, budget", "heap, ms", "build_tree, ms", "heap / build"),
        *("lean heap / build", "without the vocabulary pass", "build / reading the logits"),
    )
    rows = [
        [
            f"{r['batch']}, {r['vocab']}, {r['budget']}",
            f"{r['heap_ms']:.2f}",
            f"{r['build_ms']:.2f}",
            *(f"{r[k]:.2f}" for k in ("speedup", "speedup_lean", "speedup_rest")),
            f"{r['times_limit']:.1f}",
        ]
        for r in _records(file)
    ]
    return markdown_table(head, rows)


def _cpu_linear(file: Path) -> str:
    record = _records(file)[-1]
    plain, packed = record["milliseconds"]["plain"], record["milliseconds"]["packed"]
    rows = [
        [w, f"{plain[w]:.1f}", f"{packed[w]:.1f}", f"{packed[w] / packed['1']:.2f}"] for w in plain
    ]
    head = ["width", "plain layers, ms", "packed layers, ms", "packed, to width 1"]
    where = f"{record['capability']}, {record['threads']} threads, torch {record['torch']}"
    return f"{where}:\n\n{markdown_table(head, rows)}"


def _grammar_pruning(file: Path) -> str:
    records = _records(file)
    taus = ("unpruned", "filtered", "pruned")
    head = ["grammar, budget", *(f"tau {name}" for name in taus), "forbidden nodes, unpruned"]
    rows = [
        [f"{r['grammar']}, {r['budget']}", *(f"{r[t]:.2f}" for t in taus), f"{r['forbidden']:.0%}"]
        for r in records
    ]
    return markdown_table(head, rows)


def _side_by_side(file: Path, part: str) -> str:
    record = _records(file)[-1]
    if part == "decoding":
        head = ["", "tokens/s", "speed-up", "tau", "outputs equal to plain decoding's"]
        rows = [
            [name, f"{o['tokens_per_second']:.1f}",
             _ratio(o["speedup"]), f"{o['tau']:.2f}",
             f"{o['equal']} of {o['outputs']}"]
            for name, o in record["decoding"].items()
        ]  # fmt: skip
        return markdown_table(head, rows)
    head = ["budget", *(f"{name}, ms" for name in record["builders"]), "equally probable trees"]
    rows = [
        [budget, *(f"{times[budget]:.2f}" for times in record["builders"].values()),
         record["equally_good"][budget]]
        for budget in next(iter(record["builders"].values()))
    ]  # fmt: skip
    return markdown_table(head, rows)


def _never_slower(file: Path) -> str:
    """Rates by case, and auto's over plain's and over the best of the others with its drafter."""
    records = _records(file)
    names = list(dict.fromkeys(r["mode"] for r in records if r["drafter"] != "untrained"))
    head = [
        "prompts",
        "requests in flight",
        "drafter",
        *(f"{name}, tokens/s" for name in names),
        "auto / plain (95 %)",
        "auto / best (95 %)",
    ]
    rows = []
    for auto in (r for r in records if "over_best" in r):
        case = [auto[key] for key in ("prompts", "concurrency", "drafter")]
        rates = {
            r["mode"]: f"{r['median']:.1f}"
            for r in records
            if [r["prompts"], r["concurrency"], r["drafter"]] == case
        }
        shown = [rates.get(name, "") for name in names]
        ratios = [_ratio(auto["over"]["plain"]), _ratio(auto["over_best"])]
        rows.append([*map(str, case), *shown, *ratios])
    return markdown_table(head, rows)


def _ratio(measured: Sequence[float]) -> str:
    """A ratio with its interval, from (ratio, low, high)."""
    ratio, low, high = measured
    return f"{ratio:.2f} ({low:.2f}\u2013{high:.2f})"


def _placement(file: Path) -> str:
    """Tau of every way to spend a budget, and its ratio to best-first's with its interval."""
    records = _records(file)
    budgets = list(dict.fromkeys(r["budget"] for r in records))
    rows = []
    for way in dict.fromkeys(r["way"] for r in records):
        found = {r["budget"]: r for r in records if r["way"] == way}
        rows.append([way, *(_over_best(found[budget]) for budget in budgets)])
    return markdown_table(["", *(f"budget {b}" for b in budgets)], rows)


def _over_best(one: dict[str, Any]) -> str:
    ratio, low, high = (f"{one[key]:.3f}" for key in ("over_best", "low", "high"))
    return f"{one['tau']:.2f}: {ratio} ({low}\u2013{high})"


KINDS: dict[str, Callable[..., str]] = {
    "bench": _bench,
    "speedup": _speedup,
    "drafter-eval": _drafter_eval,
    "drafter-tau": _drafter_tau,
    "tree-build": _tree_build,
    "cpu-linear": _cpu_linear,
    "grammar-pruning": _grammar_pruning,
    "side-by-side": _side_by_side,
    "never-slower": _never_slower,
    "placement": _placement,
}
