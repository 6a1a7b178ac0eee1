"""What compiled models are trained on, and their eager twins."""
