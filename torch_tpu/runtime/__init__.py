"""The device: plugin choice, the ``torch.tpu`` module, caches on disk. The only importer of the extension."""
