"""What is decided when `fully_shard` is called: policies, placements, meshes, layouts. No memory, no communication."""
