"""Programs drawn from seeds, which combine what may be combined, and their training beside the plain model."""
