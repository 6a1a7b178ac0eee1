"""`fsdp2.timeline`: what each rank did when, as a report, a trace and a picture."""
