"""ZeRO stages per group, and small parameters that are replicated."""
