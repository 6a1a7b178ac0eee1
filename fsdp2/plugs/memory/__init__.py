"""Where parameters and gradients lie while they wait."""
