"""What the tests of `torch.compile` share: models, and their training beside eager twins."""
