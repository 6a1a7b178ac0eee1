"""Copies and pickles of sharded modules, their states and their meshes."""
