"""Placements with any number of rows on each rank, or of merged dims; their DTensor. `merged_rows` alone knows FSDP."""
