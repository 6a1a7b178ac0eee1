"""Models whose parameters lie in blocks of rows, and in rows of merged dims."""
