"""StableHLO construction. Knows MLIR text and torch dtypes; knows nothing of ATen or of the runtime."""
