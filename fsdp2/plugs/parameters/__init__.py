"""Parameters that are not plain rows on every rank, and what is asked of whole ones."""
