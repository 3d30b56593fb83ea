"""ATen to StableHLO: the one lowering library.

Eager cache misses, deferred graphs and ``torch.compile`` all call :func:`torch_tpu.lowering.driver.lower_node`.
No caller has rules of its own. Importing :mod:`torch_tpu.lowering.rules` fills the rule table.
"""
