"""`fsdp2.timeline`: what each rank did at which time, as a report, a trace and a picture."""
