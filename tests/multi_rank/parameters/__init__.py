"""Parameters out of the ordinary: shapes, ties, replacements, meta, drawn values, conversions."""
