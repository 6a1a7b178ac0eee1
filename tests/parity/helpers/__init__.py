"""What the tests of this folder share beside `tests.harness.parity`."""
