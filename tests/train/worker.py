"""A training process for the tests: worker.py STORE OUT OVERRIDES_JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from test_train import settings
from toys import toy_target

from ddtree.train.trainer import Trainer


def main() -> None:
    run = settings(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
    Trainer(run, toy_target(), say=lambda line: print(line, flush=True)).run()


if __name__ == "__main__":
    main()
