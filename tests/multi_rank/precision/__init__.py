"""Mixed precision beyond torch's policy: casts that are kept, writes that they must notice, dtypes per parameter."""
