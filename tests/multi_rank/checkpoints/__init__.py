"""`fsdp2.checkpoint`: what is saved in some processes and loaded in others, started anew. Files are real."""
