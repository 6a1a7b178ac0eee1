"""What is neither the package, nor its tests, nor its benchmarks: campaigns, with what they have recorded."""
