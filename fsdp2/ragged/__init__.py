"""A DTensor placement with any number of rows on each rank, and its DTensor. Knows nothing of FSDP."""
