"""Placements with any number of rows per rank, or of merged dims; their DTensor. Only `merged_rows` knows FSDP."""
