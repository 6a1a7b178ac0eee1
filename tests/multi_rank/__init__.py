"""On real ranks (gloo, 2 and 4 processes), beside the unsharded reference: a folder for each behaviour."""
