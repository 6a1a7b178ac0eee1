"""Models, programs and files of FSDP1, which the tests of this folder share."""
