"""`fully_shard` called again, taken back, and beside what else looks at a module's registries."""
