"""What checks run, on every rank: each has ``run(setting)``, as `extras.gpu_check.program` says."""
