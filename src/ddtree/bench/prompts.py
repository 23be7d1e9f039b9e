"""Prompts by the field's names, fetched from where they are published, or from a local JSONL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.bench.plan import BenchError
from ddtree.train.prompts import Prompt, read_prompts

# z-lab's wording (dflash.benchmark), so that taus compare with published ones.
_MATH = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_CODE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)
_SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
)


@dataclass(frozen=True)
class HubSet:
    """A data set on the Hugging Face hub and how a record becomes the user's turn."""

    path: str
    config: str | None
    split: str
    text: Callable[[dict[str, Any]], str]


HUB_SETS = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test", lambda r: r["question"] + _MATH),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", lambda r: r["problem"] + _MATH),
    "humaneval": HubSet(
        "openai/openai_humaneval", None, "test", lambda r: _CODE.format(r["prompt"])
    ),
    "mbpp": HubSet(
        "google-research-datasets/mbpp", "sanitized", "test", lambda r: str(r["prompt"])
    ),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda r: r["prompt"][0]),
}
NAMES = (*HUB_SETS, "spec-bench")


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a named set or of a JSONL file, in the set's order.

    Conversations of several turns count with their first one, as in z-lab's server benchmark.

    Raises:
        BenchError: a named set cannot be fetched, or `source` is neither a name nor a file.
        PromptError: the file holds something else than prompts.
    """
    if source in HUB_SETS:
        return _from_hub(source, limit)
    if source == "spec-bench":
        return _spec_bench(limit)
    if not Path(source).is_file():
        raise BenchError(
            f"there is no file {source} and no prompt set of that name; name a JSONL file or one "
            f"of {', '.join(NAMES)}"
        )
    return read_prompts(source, limit)


def _from_hub(name: str, limit: int | None) -> list[Prompt]:
    from datasets import load_dataset

    one = HUB_SETS[name]
    try:
        records = load_dataset(one.path, one.config, split=one.split)
    # Whatever the hub client and its HTTP library raise: there is no common class.
    except Exception as error:
        raise _unreachable(name, one.path, error) from None
    count = len(records) if limit is None else min(limit, len(records))
    return [Prompt.of_user(one.text(records[index]), name) for index in range(count)]


def _spec_bench(limit: int | None) -> list[Prompt]:
    import tempfile

    import httpx

    try:
        answer = httpx.get(_SPEC_BENCH, timeout=30, follow_redirects=True).raise_for_status()
    except httpx.HTTPError as error:
        raise _unreachable("spec-bench", _SPEC_BENCH, error) from None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spec-bench.jsonl"
        file.write_text(answer.text, encoding="utf-8")
        return read_prompts(file, limit)


def _unreachable(name: str, where: str, error: Exception) -> BenchError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return BenchError(
        f"the prompts {name} cannot be fetched from {where} ({reason}); connect to it, or name a "
        f"local JSONL of the same prompts"
    )
