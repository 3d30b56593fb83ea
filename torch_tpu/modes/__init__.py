"""How ops run. Today: eagerly, one program an op (Strict)."""
