"""Which modules become groups: `auto_shard` and `choose_groups`."""
