"""Placements with any number of rows on each rank, or of merged dims, and their DTensor. Only `merged_rows` knows of FSDP."""
