"""Programs that run without the Python model: `save` writes a model as StableHLO and weights, `load` runs it.

    nn.Module, ExportedProgram ──lower──► Lowered ──save──► folder or .zip ──load──► Program, a callable

A program is forward only and has the sizes of its example inputs. Other tools can read it too: the text is plain
StableHLO, the weights are safetensors, and `save` writes a portable artifact (versioned bytecode) on request.
"""

from torch_tpu.export.artifact import bytecode, portable_artifact
from torch_tpu.export.lower import Lowered, lower
from torch_tpu.export.manifest import Manifest
from torch_tpu.export.program import Program, load
from torch_tpu.export.saved import save

__all__ = ["Lowered", "Manifest", "Program", "bytecode", "load", "lower", "portable_artifact", "save"]
