"""Placements beyond rows in equal parts: owned parameters, blocks of rows, any number of rows."""
