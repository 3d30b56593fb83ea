"""Importing this module fills the rule table: one import a family."""

import importlib
import pkgutil

import torch_tpu.lowering

_NOT_RULES = {"driver", "registry", "promote", "rules", "siblings", "views", "decompose", "composed"}

for _module in pkgutil.iter_modules(torch_tpu.lowering.__path__):
    if _module.name not in _NOT_RULES:
        importlib.import_module(f"torch_tpu.lowering.{_module.name}")
