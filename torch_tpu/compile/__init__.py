"""``torch.compile(backend="tpu")``: whole graphs as programs, through the lowering library of the eager ops."""
