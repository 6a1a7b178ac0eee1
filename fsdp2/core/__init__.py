"""The engine: what a plain `fully_shard` run executes. README.md beside this file is to be read first."""
