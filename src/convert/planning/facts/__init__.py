"""Values that the rules name: from the leaves, the files beside the checkpoint, and `--set`."""
