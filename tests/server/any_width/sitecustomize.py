"""On a server's PYTHONPATH: every round takes an arm at random, whatever it costs.

Which arm a round takes must not change the text, and the controller would take only a few of them.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from importlib.abc import Loader, MetaPathFinder


class _RandomArms(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        if name != "ddtree.budget":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            draw = random.Random(0)
            module.Controller.choose = lambda self, batch, context=0: draw.choice(self.arms)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _RandomArms())
