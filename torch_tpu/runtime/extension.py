"""The extension module, for the layers above."""

import time

from torch_tpu import _C

# Before any rule is imported: a source file newer than this may not be what runs.
LOADED_NS = time.time_ns()

CompiledGraph = _C.CompiledGraph
Form = _C.Form
bounds_stats = _C.bounds_stats
install_lowering = _C.install_lowering
install_runtime = _C.install_runtime
register_kernels = _C.register_kernels
cache_stats = _C.cache_stats
clear_cache = _C.clear_cache
set_max_programs = _C.set_max_programs
keep_optimized = _C.keep_optimized
set_cpu_fallback = _C.set_cpu_fallback
cpu_fallback_counts = _C.cpu_fallback_counts
plugin_info = _C.plugin_info
device_info = _C.device_info
run_stablehlo = _C.run_stablehlo
compile_for_topology = _C.compile_for_topology
storage_form = _C.storage_form
