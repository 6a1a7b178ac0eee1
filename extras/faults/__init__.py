"""Faults put into training programs, and what comes of them: ``make faults`` runs them under torch and fsdp2."""
