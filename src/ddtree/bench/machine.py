"""Where a benchmark ran: commit, versions, hardware, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("sglang-ddtree", "torch", "transformers", "sglang", "triton", "dflash")


def environment() -> dict[str, Any]:
    """Commit, versions and hardware, as records hold them."""
    return {"commit": commit(), "versions": versions(), "hardware": hardware()}


def commit() -> str | None:
    """The checkout's commit, with ``+changes`` where files differ; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of what takes part in decoding, as far as installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}  # with the build, unlike the distribution's


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory, GPUs, threads, load when asked."""
    flags = _cpu_info("flags").split()
    return {
        "cpu": _cpu_info("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _cpu_info(key: str) -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
