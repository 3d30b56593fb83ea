"""All bounded forms: importing this module fills the table of bounded.py. Ops without one run as one program a size."""

from torch_tpu.lowering import bounded_compute, bounded_index, bounded_views

__all__ = ["bounded_compute", "bounded_index", "bounded_views"]
