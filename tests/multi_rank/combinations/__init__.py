"""Programs drawn from seeds, in which everything meets everything."""
