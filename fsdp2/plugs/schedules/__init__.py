"""Orders of exchanges, and backwards, other than the learned ones."""
