"""Names under which published libraries look for what other modules of torch_tpu have. Nothing is implemented here."""
