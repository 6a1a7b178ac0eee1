"""`fsdp2.timeline`: what each rank did when, as a report, a trace, a picture and a page."""
