"""What tests share: writers of checkpoints, models, and paths."""
